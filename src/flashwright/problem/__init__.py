"""What is computed, apart from how: element types, masks, lengths, scores, and the checks of what users give."""
