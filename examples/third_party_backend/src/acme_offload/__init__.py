"""sidestream's `leaf_wise` strategy: a module's weights are on the device only while that module computes."""
