"""A plugin of pytest that `course.py test` loads before nbval: it saves each process of the tests seconds.

nbval reads notebooks by jsonschema, which imports rfc3987_syntax where that is installed. That package compiles 38
grammars, in 3 s, to check a format of addresses that no notebook has.
"""

import sys

sys.modules.setdefault("rfc3987_syntax", None)  # importing it raises ImportError, which jsonschema expects
