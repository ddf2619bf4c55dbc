// The threads of this interpreter, and whether they rest.
#pragma once

#include <string>

namespace tenure::python {

// Note [When another thread rests]
// A thread that wants the GIL, which the caller has, can do nothing until it is given. A thread
// that sleeps in any other call may wake meanwhile: in most calls it then wants the GIL at once,
// but in the middle of an operator (waiting for the threads that compute it, say) it goes on to
// change the autograd graph. Which call it is cannot be seen. So a thread rests if it waits for the
// GIL, if it waits in the kernel for something that operators do not wait for (time, a file, a
// socket, a process), if the innermost function of Python's is one of Python's own library and is
// not calling what somebody gave it, or if it has slept for seconds.
//
// None rests that sets an attribute: `p.grad = None` frees the gradient, for which torch gives up
// the GIL, before the parameter forgets it, and a look would follow it to freed memory.

// Whether all threads of Python's but the caller's rest, and none, the caller's included, sets an
// attribute or is inside autograd's engine, of which frames of the file `engine` tell. `library` is
// the folder of Python's own library.
// REQUIRES: the GIL.
bool others_rest(const std::string& engine, const std::string& library);

// Whether a thread but the caller's sets an attribute or is inside autograd's engine: what it does
// there to a gradient it goes on with as soon as the GIL is given up, or without it.
// REQUIRES: the GIL.
bool others_change_gradients(const std::string& engine);

}  // namespace tenure::python
