"""Variables of parallel models: pending (without a value yet), whole, or sharded over ranks."""
