"""Plans of calls, computed only from shapes, masks and device specifications, without access to devices or data."""
