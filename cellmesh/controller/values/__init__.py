"""Large values in the controller: sent to ranks whole or in parts, and put together from parts."""
