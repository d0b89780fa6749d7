"""Pictures of a config, each a function from facts to one SVG element. Colours come from the page's stylesheet."""
