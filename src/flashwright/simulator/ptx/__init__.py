"""Reading PTX text: types, syntax tree, parser. Knows the language, nothing of its execution."""
