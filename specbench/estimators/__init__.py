"""Estimators of acceptance, fitted once and used by the policies every step."""
