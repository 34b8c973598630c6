"""Training a DSpark drafter for a target: data, features, training, evaluation, export."""
