"""The paper's provisioning study, run again: its designs, its searches, and what accounts for each difference."""
