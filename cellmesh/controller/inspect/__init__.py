"""Looking at ranks: their values, their past, what they log, how they are."""
