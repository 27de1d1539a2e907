"""The module that `import deep_ep` finds where this folder's parent is on the path: `symmpool.deep_ep`."""

import symmpool.deep_ep

# The import that is under way is over when this module's place is taken.
_IS_SYMMPOOL = True
symmpool.deep_ep.install()
