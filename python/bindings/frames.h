// Python frames, as inspect needs them.
#pragma once

#include <Python.h>

#include <functional>
#include <string>
#include <vector>

// From now on births know their line of Python. `torch` and `library` are folders with a slash at
// the end, `module_call` the code object of nn.Module.__call__. Only the first call counts.
void install_python_frames(const std::string& torch, std::vector<std::string> library,
                           PyObject* module_call);

// Calls fn(code, instruction, values, count) for each running frame of the thread, innermost first:
// the values are the frame's locals (co_localsplusnames says which) and then its stack; any of them
// may be null.
// REQUIRES: the GIL.
void each_local(PyThreadState* thread,
                const std::function<void(PyCodeObject*, int, PyObject**, int)>& fn);
