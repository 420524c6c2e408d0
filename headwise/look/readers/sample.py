"""What to look at when nothing is given: names that come back, so that heads find them again."""

TEXT = """\
The lighthouse of Saint Marlow stands on a rock at the mouth of the river Tamsin. It was built in \
1821 by the engineer Edmund Harrowgate, who had never seen the sea before. Edmund Harrowgate came \
from a family of clockmakers, and the lamp of the lighthouse of Saint Marlow turns to this day on \
a clockwork that he made himself.

The first keeper was Johanna Pell. Johanna Pell lived on the rock for forty-one years with two \
goats, a telescope and a library of three hundred books, all of which she had read at least \
twice. In her diary she wrote down the weather, the ships, and what the goats had eaten. In the \
winter of 1838 the goats had eaten a chart of the river Tamsin, and the ships that asked for the \
chart were sent away with a goat.

On the night of 9 November 1844 the ship Northern Crown, with a cargo of oranges, lost its way in \
the fog. The captain of the Northern Crown saw no light, because there was no light: the \
clockwork had stopped. Johanna Pell climbed the one hundred and twelve steps, found a moth \
between two wheels of the clockwork, and took it out with a hairpin. The light turned again. The \
Northern Crown turned too, and for a week the children of Saint Marlow ate oranges on the beach.

The moth was kept. It can be seen in the museum of Saint Marlow, in a glass case, beside the \
hairpin of Johanna Pell and the spectacles of Edmund Harrowgate. The label says: "The moth that \
stopped the lighthouse." Visitors ask for the moth more often than for the spectacles, and more \
often for the oranges than for the moth.

In 1921, one hundred years after Edmund Harrowgate had lit the lamp for the first time, the \
lighthouse of Saint Marlow was given electric light. The clockwork was left in its place. Every \
year, on 9 November, the electric light is turned off for an hour, the clockwork is wound up by \
hand, and the lamp turns as it turned for Johanna Pell. The ships on the river Tamsin sound their \
horns, and someone always brings a goat.
"""
"""For a language model: it has not met these names, so only what stands before can tell them."""

ENGLISH = "She has never seen such a big black dog in her life."
"""For the translator: an English sentence whose French stands in another order."""
