"""Classifiers whose last layer is learnt on the device."""
