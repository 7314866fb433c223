"""A plugin of pytest that `course.py test` loads before nbval: it saves each process of the tests seconds.

nbval reads notebooks with jsonschema, which imports rfc3987_syntax if it is installed. That package spends 3 s on
compiling 38 grammars, to check an address format that no notebook uses.
"""

import sys

sys.modules.setdefault("rfc3987_syntax", None)  # importing it raises ImportError, which jsonschema expects
