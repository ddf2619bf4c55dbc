// Python's small objects lie in arenas that it maps itself: malloc knows nothing of them.
#pragma once

// From now on the observer is told how much Python maps and gives back; until the other is called.
// REQUIRES: the GIL.
void watch_arenas();
void unwatch_arenas();
