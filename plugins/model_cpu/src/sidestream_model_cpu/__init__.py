"""sidestream's `model_level` strategy: whole components take turns on the device."""
