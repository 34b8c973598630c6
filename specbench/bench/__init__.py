"""The measuring instrument: plans rounds, drives an engine through them, sums them up."""
