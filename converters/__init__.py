"""Offline conversions between checkpoints: plans executed as file IO."""
