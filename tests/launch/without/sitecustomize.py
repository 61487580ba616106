"""Python imports this as it starts: the collector looks less often at what TensorFlow imports.

Almost nothing that is imported is garbage, and looking for it took a tenth of a rank's start.
"""

import gc

gc.set_threshold(20_000, 20, 20)
