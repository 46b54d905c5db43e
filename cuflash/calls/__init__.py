"""The path of a call: its arguments are checked, its plan is looked up or created, and its passes run."""
