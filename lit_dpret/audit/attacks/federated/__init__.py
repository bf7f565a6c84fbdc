"""What those who take part in a federation could learn of a silo's queries from what reaches them."""
