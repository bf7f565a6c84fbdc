"""What attacks prove about a claim: their statistics, canaries, attacks on finished models, and `assert_private`."""
