"""Decides what a call runs, from its shapes, its mask and a device's numbers; no device and no data are touched."""
