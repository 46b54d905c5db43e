"""Plans of calls, computed from shapes, masks and device specifications alone; no device and no data are touched."""
