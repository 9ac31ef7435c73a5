"""What a store counts, in the formats of monitoring systems; each module needs the client of its own."""
