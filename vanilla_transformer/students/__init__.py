"""Students: small models trained on the translations of a teacher (sequence-level distillation, Kim & Rush, 2016)."""
