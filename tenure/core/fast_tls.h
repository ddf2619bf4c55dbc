// Thread-locals of hot paths. A shared library reaches its thread-locals through a call; this model
// reaches them through a register, at the price of the few bytes that the loader keeps in reserve
// for it. Only for plain data of a few words: it must stay well below that reserve (about 1.5 KiB
// for all libraries together), and it may be read while the thread's destructors run.
#pragma once

#define TENURE_FAST_TLS thread_local __attribute__((tls_model("initial-exec")))
