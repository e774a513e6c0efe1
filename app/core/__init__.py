"""The words that every other module speaks: records, facts, errors, observers. No third party."""
