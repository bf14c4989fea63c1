// What runs at every call of a compiled program, without Python's cost: no torch headers, no CUDA
// headers.
// `Kernel(name, otherwise, function, context, kinds, warps, shared, flags, clusters, launch,
// launch_ex, set_context)` launches through the driver: `kernel(stream, x, y, z, *arguments)`. An
// argument whose kind is a capital letter must be a multiple of 16; if it is not, `otherwise` is
// called instead. A launch that does not fit the card goes to `spare`, where there is one.
// `Function(name, address, count)` is a function of the host's, of tensors, addresses and integers.
// `Entry(program, switch)` is called with arguments, and gives them to the program as a list; around
// it `switch` is called, with None and with what it said then.
// `Replay(...)` starts a recorded CUDA graph, if nothing has changed since it was recorded.
// `begin_turn()` and `end_turn()` are around what no other thread's replay may come between.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace {

using Result = int;
using Launch = Result (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          unsigned, void*, void**, void**);
struct Attribute {  // CUlaunchAttribute
    int id;
    char pad[4];
    union { char space[64]; int number; unsigned dims[3]; } value;
};
struct Config {  // CUlaunchConfig
    unsigned grid[3], block[3], shared;
    void* stream;
    Attribute* attributes;
    unsigned count;
};
using LaunchEx = Result (*)(const Config*, void*, void**, void**);
using SetContext = Result (*)(void*);

constexpr int COOPERATIVE = 1, DEPENDENT = 2, HIDDEN = 4;
constexpr Result INVALID_VALUE = 1, INVALID_CONTEXT = 201, OUT_OF_RESOURCES = 701;
constexpr unsigned long long MOST_PROGRAMS[3] = {2147483647, 65535, 65535};

struct Kernel {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject* name;
    PyObject* otherwise;
    PyObject* spare;
    void* function;
    void* context;
    char* kinds;
    Py_ssize_t count;
    unsigned threads, shared, clusters;
    int flags;
    Launch launch;
    LaunchEx launch_ex;
    SetContext set_context;
};

PyObject* data_ptr_name;
PyObject* data_ptr_of;  // the method of torch's own tensor type, found at the first tensor
PyTypeObject* tensor_type;

// Of a tensor of another type than torch's own; one of FakeTensorMode has elements and no memory.
uint64_t address_of_other(PyObject* value) {
    PyObject* number = PyObject_CallMethodNoArgs(value, data_ptr_name);
    if (!number) return UINT64_MAX;
    const uint64_t found = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (found) return found;
    PyObject* elements = PyObject_CallMethod(value, "numel", nullptr);
    const int some = elements ? PyObject_IsTrue(elements) : -1;
    Py_XDECREF(elements);
    if (some > 0)
        PyErr_Format(PyExc_RuntimeError,
                     "a compiled program was given a %.100s, which has no memory: call the function"
                     " that was compiled, or do so outside of FakeTensorMode", Py_TYPE(value)->tp_name);
    return some ? UINT64_MAX : 0;
}

// The address of a tensor, or a number as one; -1 with an error set for anything else.
uint64_t address(PyObject* value) {
    if (PyLong_Check(value)) return PyLong_AsUnsignedLongLong(value);
    if (Py_TYPE(value) != tensor_type) return address_of_other(value);
    PyObject* number = PyObject_Vectorcall(data_ptr_of, &value, 1, nullptr);
    if (!number) return UINT64_MAX;
    const uint64_t found = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return found;
}

// ---- kernels of a card

Result start(const Kernel* k, const unsigned grid[3], void* stream, void** params) {
    if (!k->flags && k->clusters == 1)
        return k->launch(k->function, grid[0], grid[1], grid[2], k->threads, 1, 1, k->shared,
                         stream, params, nullptr);
    Attribute attributes[3] = {};
    Config config = {{grid[0] * k->clusters, grid[1], grid[2]}, {k->threads, 1, 1}, k->shared,
                     stream, attributes, 0};
    if (k->flags & COOPERATIVE) {
        Attribute& a = attributes[config.count++];
        a.id = 2, a.value.number = 1;
    }
    if (k->flags & DEPENDENT) {
        Attribute& a = attributes[config.count++];
        a.id = 6, a.value.number = 1;
    }
    if (k->clusters > 1) {
        Attribute& a = attributes[config.count++];
        a.id = 4, a.value.dims[0] = k->clusters, a.value.dims[1] = a.value.dims[2] = 1;
    }
    return k->launch_ex(&config, k->function, params, nullptr);
}

// The bytes of one argument, as the kernel's parameter space holds it.
bool convert(char kind, PyObject* value, uint64_t* out) {
    *out = 0;
    switch (kind) {
        case 'p': case 'P':
            if (value == Py_None) return true;
            *out = address(value);
            break;
        case 'i': case 'l': case 'I': case 'L': {
            const long long number = PyLong_AsLongLong(value);
            memcpy(out, &number, 8);
            break;
        }
        case 'f': {
            const float number = static_cast<float>(PyFloat_AsDouble(value));
            memcpy(out, &number, 4);
            break;
        }
        default: {
            const double number = PyFloat_AsDouble(value);
            memcpy(out, &number, 8);
        }
    }
    return *out != UINT64_MAX || !PyErr_Occurred();
}

PyObject* call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
    const Kernel* k = reinterpret_cast<Kernel*>(self);
    const Py_ssize_t given = PyVectorcall_NARGS(flags);
    if (given != k->count + 4 || names)
        return PyErr_Format(PyExc_TypeError, "%U takes a stream, a grid of 3 and %zd arguments",
                            k->name, k->count);
    uint64_t values[k->count + 1];
    void* params[k->count + HIDDEN];
    void* const stream = PyLong_AsVoidPtr(args[0]);
    unsigned grid[3];
    bool fits = true;
    for (int d = 0; d < 3; ++d) {
        const unsigned long long programs = PyLong_AsUnsignedLongLong(args[1 + d]);
        fits &= programs <= MOST_PROGRAMS[d];
        grid[d] = static_cast<unsigned>(programs);
    }
    for (Py_ssize_t i = 0; i < k->count; ++i) {
        if (!convert(k->kinds[i], args[4 + i], &values[i])) return nullptr;
        if (k->kinds[i] < 'a' && values[i] & 15)
            return PyObject_Vectorcall(k->otherwise, args, given, nullptr);
        params[i] = &values[i];
    }
    if (PyErr_Occurred()) return nullptr;
    // What Triton appends for itself (scratch memory); unused, so null.
    values[k->count] = 0;
    for (int i = 0; i < HIDDEN; ++i) params[k->count + i] = &values[k->count];
    if (fits && (grid[0] == 0 || grid[1] == 0 || grid[2] == 0)) Py_RETURN_NONE;
    Result result;
    Py_BEGIN_ALLOW_THREADS
    result = fits ? start(k, grid, stream, params) : INVALID_VALUE;
    if (result == INVALID_CONTEXT && k->set_context(k->context) == 0)  // a thread new to CUDA
        result = start(k, grid, stream, params);
    Py_END_ALLOW_THREADS
    if ((result == INVALID_VALUE || result == OUT_OF_RESOURCES) && k->spare && k->spare != Py_None)
        return PyObject_Vectorcall(k->spare, args, given, nullptr);
    if (result != 0)
        return PyErr_Format(PyExc_RuntimeError, "CUDA error %d when launching %U", result, k->name);
    Py_RETURN_NONE;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *name, *otherwise;
    unsigned long long function, context, launch, launch_ex, set_context;
    const char* kinds;
    Py_ssize_t count;
    unsigned warps, shared, clusters;
    int flags;
    if (!PyArg_ParseTuple(args, "UOKKs#IIiIKKK", &name, &otherwise, &function, &context, &kinds,
                          &count, &warps, &shared, &flags, &clusters, &launch, &launch_ex,
                          &set_context))
        return nullptr;
    Kernel* k = reinterpret_cast<Kernel*>(type->tp_alloc(type, 0));
    if (!k) return nullptr;
    k->kinds = static_cast<char*>(PyMem_Malloc(count + 1));
    if (!k->kinds) return PyErr_NoMemory();
    memcpy(k->kinds, kinds, count + 1);
    Py_INCREF(name), Py_INCREF(otherwise);
    k->name = name, k->otherwise = otherwise, k->count = count, k->call = call;
    k->function = reinterpret_cast<void*>(function), k->context = reinterpret_cast<void*>(context);
    k->threads = 32 * warps, k->shared = shared, k->flags = flags, k->clusters = clusters;
    k->launch = reinterpret_cast<Launch>(launch);
    k->launch_ex = reinterpret_cast<LaunchEx>(launch_ex);
    k->set_context = reinterpret_cast<SetContext>(set_context);
    return reinterpret_cast<PyObject*>(k);
}

void drop(PyObject* self) {
    Kernel* k = reinterpret_cast<Kernel*>(self);
    PyTypeObject* type = Py_TYPE(self);
    PyMem_Free(k->kinds);
    Py_XDECREF(k->name), Py_XDECREF(k->otherwise), Py_XDECREF(k->spare);
    type->tp_free(self);
    Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Kernel, call), READONLY, nullptr},
    {"name", T_OBJECT, offsetof(Kernel, name), READONLY, nullptr},
    {"otherwise", T_OBJECT, offsetof(Kernel, otherwise), READONLY, nullptr},
    {"spare", T_OBJECT, offsetof(Kernel, spare), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(drop)},
                       {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_members, members},
                       {0, nullptr}};
PyType_Spec spec = {"tw_launch.Kernel", sizeof(Kernel), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};

// ---- functions of the host

constexpr int MOST = 40;  // arguments

template <int... I>
void with(void* function, const int64_t* a, std::integer_sequence<int, I...>) {
    reinterpret_cast<void (*)(decltype(int64_t(I))...)>(function)(a[I]...);
}
template <int N>
void with(void* function, const int64_t* a) {
    with(function, a, std::make_integer_sequence<int, N>());
}
using With = void (*)(void*, const int64_t*);
template <int... N>
const With* withs(std::integer_sequence<int, N...>) {
    static const With table[] = {with<N>...};
    return table;
}

struct Function {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject* name;
    void* function;
    With with;
    Py_ssize_t count;
};

PyObject* call_function(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
    const Function* f = reinterpret_cast<Function*>(self);
    if (PyVectorcall_NARGS(flags) != f->count || names)
        return PyErr_Format(PyExc_TypeError, "%U takes %zd arguments", f->name, f->count);
    int64_t values[MOST];
    for (Py_ssize_t i = 0; i < f->count; ++i) {
        values[i] = PyLong_Check(args[i]) ? PyLong_AsLongLong(args[i])
                                          : static_cast<int64_t>(address(args[i]));
        if (values[i] == -1 && PyErr_Occurred()) return nullptr;
    }
    Py_BEGIN_ALLOW_THREADS
    f->with(f->function, values);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject* make_function(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject* name;
    unsigned long long function;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "UKn", &name, &function, &count)) return nullptr;
    if (count < 0 || count >= MOST)
        return PyErr_Format(PyExc_ValueError, "at most %d arguments", MOST - 1);
    Function* f = reinterpret_cast<Function*>(type->tp_alloc(type, 0));
    if (!f) return nullptr;
    Py_INCREF(name);
    f->call = call_function, f->name = name, f->function = reinterpret_cast<void*>(function);
    f->count = count, f->with = withs(std::make_integer_sequence<int, MOST>())[count];
    return reinterpret_cast<PyObject*>(f);
}

void drop_function(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_XDECREF(reinterpret_cast<Function*>(self)->name);
    type->tp_free(self);
    Py_DECREF(type);
}

PyMemberDef function_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Function, call), READONLY, nullptr},
    {"__name__", T_OBJECT, offsetof(Function, name), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot function_slots[] = {{Py_tp_new, reinterpret_cast<void*>(make_function)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(drop_function)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_members, function_members},
                                {0, nullptr}};
PyType_Spec function_spec = {"tw_launch.Function", sizeof(Function), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, function_slots};

// ---- the way into a program

struct Entry {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject* program;
    PyObject* switched;  // null: nothing is
};

// Switch back, whatever became of the program; its error is the one to tell.
PyObject* back(const Entry* e, PyObject* before, PyObject* result) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject* done = PyObject_CallOneArg(e->switched, before);
    Py_DECREF(before);
    if (done && type) PyErr_Restore(type, value, trace);
    else Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
    if (!done) Py_CLEAR(result);
    Py_XDECREF(done);
    return result;
}

PyObject* enter(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
    const Entry* e = reinterpret_cast<Entry*>(self);
    if (names) return PyErr_Format(PyExc_TypeError, "a program takes no keywords");
    const Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject* list = PyList_New(count);
    if (!list) return nullptr;
    for (Py_ssize_t i = 0; i < count; ++i) {
        Py_INCREF(args[i]);
        PyList_SET_ITEM(list, i, args[i]);
    }
    PyObject* before = e->switched ? PyObject_CallOneArg(e->switched, Py_None) : nullptr;
    PyObject* result = nullptr;
    if (before || !e->switched) result = PyObject_CallOneArg(e->program, list);
    Py_DECREF(list);
    return before ? back(e, before, result) : result;
}

PyObject* make_entry(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *program, *switched = Py_None;
    if (!PyArg_ParseTuple(args, "O|O", &program, &switched)) return nullptr;
    Entry* e = reinterpret_cast<Entry*>(type->tp_alloc(type, 0));
    if (!e) return nullptr;
    Py_INCREF(program);
    e->call = enter, e->program = program;
    if (switched != Py_None) Py_INCREF(switched), e->switched = switched;
    return reinterpret_cast<PyObject*>(e);
}

int visit_entry(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(reinterpret_cast<Entry*>(self)->program);
    Py_VISIT(reinterpret_cast<Entry*>(self)->switched);
    return 0;
}

int clear_entry(PyObject* self) {
    Py_CLEAR(reinterpret_cast<Entry*>(self)->program);
    Py_CLEAR(reinterpret_cast<Entry*>(self)->switched);
    return 0;
}

void drop_entry(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear_entry(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyMemberDef entry_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Entry, call), READONLY, nullptr},
    {"program", T_OBJECT, offsetof(Entry, program), READONLY, nullptr},
    {"switch", T_OBJECT, offsetof(Entry, switched), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

// Whoever looks for Python's code in what Dynamo calls finds the program's.
PyObject* entry_code(PyObject* self, void*) {
    return PyObject_GetAttrString(reinterpret_cast<Entry*>(self)->program, "__code__");
}

PyGetSetDef entry_values[] = {{"__code__", entry_code, nullptr, nullptr, nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot entry_slots[] = {{Py_tp_new, reinterpret_cast<void*>(make_entry)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(drop_entry)},
                             {Py_tp_traverse, reinterpret_cast<void*>(visit_entry)},
                             {Py_tp_clear, reinterpret_cast<void*>(clear_entry)},
                             {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                             {Py_tp_members, entry_members},
                             {Py_tp_getset, entry_values},
                             {0, nullptr}};
PyType_Spec entry_spec = {"tw_launch.Entry", sizeof(Entry), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC,
                          entry_slots};

// ---- recorded programs

using Capturing = Result (*)(void*, int*);
using Copy = Result (*)(uint64_t, uint64_t, size_t, void*);
using StartGraph = Result (*)(void*, void*);

// One thread at a time records, or replays and takes the results. Who waits lets Python go on.
std::recursive_mutex turns;

struct Turn {
    Turn() { begin(); }
    ~Turn() { turns.unlock(); }
    static void begin() {
        if (turns.try_lock()) return;
        Py_BEGIN_ALLOW_THREADS
        turns.lock();
        Py_END_ALLOW_THREADS
    }
};

PyObject* begin_turn(PyObject*, PyObject*) {
    Turn::begin();
    Py_RETURN_NONE;
}

PyObject* end_turn(PyObject*, PyObject*) {
    turns.unlock();
    Py_RETURN_NONE;
}

struct Move {  // between an argument and memory of the recording
    Py_ssize_t argument;
    uint64_t memory, bytes;
};

// Replay(driver, graph, stream_of, uses, places, handed): `driver` are the addresses of
// cuGraphLaunch, cuStreamIsCapturing and cuMemcpyDtoDAsync; `stream_of` is (function, device,
// the stream it was recorded for); `uses` is (function, ((storage, uses), ...)): memory that callers
// may hold; `places` is (fixed, in, back, cells): ((argument, address), ...), twice ((argument,
// memory, bytes), ...), and ((address, count), ...) of words that are zero while all is well;
// `handed` is ((function, arguments), ...), one per result. Called with the list of arguments; the
// answer is None where it does not apply, and then nothing was done.
struct Replay {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *driver, *stream_of, *uses, *handed;
    StartGraph start;
    Capturing capturing;
    Copy copy;
    void *graph, *stream;
    std::vector<std::pair<Py_ssize_t, uint64_t>>* fixed;
    std::vector<Move>*in, *back;
    std::vector<std::pair<const int64_t*, size_t>>* cells;
};

uint64_t word(PyObject* tuple, Py_ssize_t k) {
    return PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(tuple, k));
}

// Whether callers hold memory that would be overwritten; -1 for an error.
int held(const Replay* r) {
    PyObject* function = PyTuple_GET_ITEM(r->uses, 0);
    PyObject* watched = PyTuple_GET_ITEM(r->uses, 1);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(watched); ++i) {
        PyObject* item = PyTuple_GET_ITEM(watched, i);
        PyObject* found = PyObject_CallOneArg(function, PyTuple_GET_ITEM(item, 0));
        if (!found) return -1;
        const long long now = PyLong_AsLongLong(found);
        Py_DECREF(found);
        if (now > PyLong_AsLongLong(PyTuple_GET_ITEM(item, 1))) return 1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

// 1 if the graph can be started as it is, 0 if not, -1 for an error.
int applies(const Replay* r, PyObject* args) {
    PyObject* found = PyObject_CallOneArg(PyTuple_GET_ITEM(r->stream_of, 0),
                                          PyTuple_GET_ITEM(r->stream_of, 1));
    if (!found) return -1;
    void* const stream = PyLong_AsVoidPtr(found);
    Py_DECREF(found);
    int busy = 0;
    if (stream != r->stream || r->capturing(stream, &busy) != 0 || busy) return 0;
    for (const auto& [cells, count] : *r->cells)
        for (size_t k = 0; k < count; ++k)
            if (cells[k]) return 0;
    for (const auto& [k, expected] : *r->fixed) {
        if (k >= PyList_GET_SIZE(args)) return 0;
        const uint64_t now = address(PyList_GET_ITEM(args, k));
        if (now == UINT64_MAX && PyErr_Occurred()) return -1;
        if (now != expected) return 0;
    }
    const int taken = held(r);
    return taken < 0 ? -1 : !taken;
}

PyObject* results(const Replay* r, PyObject* args) {
    const Py_ssize_t count = PyTuple_GET_SIZE(r->handed);
    PyObject* made = PyTuple_New(count);
    for (Py_ssize_t i = 0; made && i < count; ++i) {
        PyObject* item = PyTuple_GET_ITEM(r->handed, i);
        PyObject* function = PyTuple_GET_ITEM(item, 0);
        PyObject* given = PyTuple_GET_ITEM(item, 1);
        PyObject* result;
        if (function == Py_None) Py_INCREF(given), result = given;
        else if (given == Py_None) result = PyObject_CallOneArg(function, args);
        else result = PyObject_Call(function, given, nullptr);
        if (result) PyTuple_SET_ITEM(made, i, result);
        else Py_CLEAR(made);
    }
    return made;
}

Result copied(const Replay* r, uint64_t to, uint64_t from, uint64_t bytes) {
    return bytes ? r->copy(to, from, bytes, r->stream) : 0;
}

PyObject* replay(PyObject* self, PyObject* const* given, size_t flags, PyObject* names) {
    const Replay* r = reinterpret_cast<Replay*>(self);
    if (PyVectorcall_NARGS(flags) != 1 || names || !PyList_CheckExact(given[0]))
        return PyErr_Format(PyExc_TypeError, "a recording takes a list");
    PyObject* args = given[0];
    const Turn turn;
    const int can = applies(r, args);
    if (can < 0) return nullptr;
    if (!can) Py_RETURN_NONE;
    std::vector<uint64_t> moved;
    for (const Move& m : *r->in) moved.push_back(address(PyList_GET_ITEM(args, m.argument)));
    std::vector<uint64_t> home;
    for (const Move& m : *r->back) home.push_back(address(PyList_GET_ITEM(args, m.argument)));
    if (PyErr_Occurred()) return nullptr;
    Result code = 0;
    Py_BEGIN_ALLOW_THREADS
    for (size_t k = 0; k < moved.size() && !code; ++k)
        code = copied(r, (*r->in)[k].memory, moved[k], (*r->in)[k].bytes);
    if (!code) code = r->start(r->graph, r->stream);
    for (size_t k = 0; k < home.size() && !code; ++k)
        code = copied(r, home[k], (*r->back)[k].memory, (*r->back)[k].bytes);
    Py_END_ALLOW_THREADS
    if (code) Py_RETURN_NONE;  // torch tries again, and reports what is wrong
    PyObject* made = results(r, args);
    if (made && PyList_SetSlice(args, 0, PyList_GET_SIZE(args), nullptr) < 0) Py_CLEAR(made);
    return made;
}

std::vector<Move>* moves(PyObject* tuple) {
    auto* made = new std::vector<Move>();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
        PyObject* item = PyTuple_GET_ITEM(tuple, i);
        made->push_back({static_cast<Py_ssize_t>(word(item, 0)), word(item, 1), word(item, 2)});
    }
    return made;
}

PyObject* make_replay(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *driver, *stream_of, *uses, *places, *handed;
    unsigned long long graph;
    if (!PyArg_ParseTuple(args, "O!KO!O!O!O!", &PyTuple_Type, &driver, &graph, &PyTuple_Type,
                          &stream_of, &PyTuple_Type, &uses, &PyTuple_Type, &places, &PyTuple_Type,
                          &handed))
        return nullptr;
    Replay* r = reinterpret_cast<Replay*>(type->tp_alloc(type, 0));
    if (!r) return nullptr;
    Py_INCREF(driver), Py_INCREF(stream_of), Py_INCREF(uses), Py_INCREF(handed);
    r->call = replay, r->driver = driver, r->stream_of = stream_of, r->uses = uses;
    r->handed = handed, r->graph = reinterpret_cast<void*>(graph);
    r->start = reinterpret_cast<StartGraph>(word(driver, 0));
    r->capturing = reinterpret_cast<Capturing>(word(driver, 1));
    r->copy = reinterpret_cast<Copy>(word(driver, 2));
    r->stream = reinterpret_cast<void*>(word(stream_of, 2));
    r->fixed = new std::vector<std::pair<Py_ssize_t, uint64_t>>();
    r->cells = new std::vector<std::pair<const int64_t*, size_t>>();
    PyObject *fixed = PyTuple_GET_ITEM(places, 0), *cells = PyTuple_GET_ITEM(places, 3);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fixed); ++i) {
        PyObject* item = PyTuple_GET_ITEM(fixed, i);
        r->fixed->push_back({static_cast<Py_ssize_t>(word(item, 0)), word(item, 1)});
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(cells); ++i) {
        PyObject* item = PyTuple_GET_ITEM(cells, i);
        r->cells->push_back({reinterpret_cast<const int64_t*>(word(item, 0)), word(item, 1)});
    }
    r->in = moves(PyTuple_GET_ITEM(places, 1)), r->back = moves(PyTuple_GET_ITEM(places, 2));
    if (PyErr_Occurred()) Py_CLEAR(r);
    return reinterpret_cast<PyObject*>(r);
}

int visit_replay(PyObject* self, visitproc visit, void* arg) {
    Replay* r = reinterpret_cast<Replay*>(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(r->stream_of);
    Py_VISIT(r->uses);
    Py_VISIT(r->handed);
    return 0;
}

int clear_replay(PyObject* self) {
    Replay* r = reinterpret_cast<Replay*>(self);
    Py_CLEAR(r->driver);
    Py_CLEAR(r->stream_of);
    Py_CLEAR(r->uses);
    Py_CLEAR(r->handed);
    return 0;
}

void drop_replay(PyObject* self) {
    Replay* r = reinterpret_cast<Replay*>(self);
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear_replay(self);
    delete r->fixed, delete r->cells, delete r->in, delete r->back;
    type->tp_free(self);
    Py_DECREF(type);
}

PyMemberDef replay_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Replay, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot replay_slots[] = {{Py_tp_new, reinterpret_cast<void*>(make_replay)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(drop_replay)},
                              {Py_tp_traverse, reinterpret_cast<void*>(visit_replay)},
                              {Py_tp_clear, reinterpret_cast<void*>(clear_replay)},
                              {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                              {Py_tp_members, replay_members},
                              {0, nullptr}};
PyType_Spec replay_spec = {"tw_launch.Replay", sizeof(Replay), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC,
                           replay_slots};

// ---- the module

// tensor(type): torch's own type of tensors, whose method gives an address without a search.
PyObject* tensor(PyObject*, PyObject* type) {
    if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "tensor takes a type");
    PyObject* method = PyObject_GetAttr(type, data_ptr_name);
    if (!method) return nullptr;
    Py_XSETREF(data_ptr_of, method);
    Py_INCREF(type);
    tensor_type = reinterpret_cast<PyTypeObject*>(type);
    Py_RETURN_NONE;
}

// pointers(arguments): the address of each tensor, 0 for what is none.
PyObject* pointers(PyObject*, PyObject* list) {
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "pointers takes a list");
    const Py_ssize_t count = PyList_GET_SIZE(list);
    PyObject* found = PyTuple_New(count);
    for (Py_ssize_t i = 0; found && i < count; ++i) {
        PyObject* item = PyList_GET_ITEM(list, i);
        const bool none = PyLong_Check(item) || PyFloat_Check(item) || item == Py_None;
        const uint64_t number = none ? 0 : address(item);
        if (PyErr_Occurred()) Py_CLEAR(found);
        else PyTuple_SET_ITEM(found, i, PyLong_FromUnsignedLongLong(number));
    }
    return found;
}

// copy(cuMemcpyDtoDAsync, to, from, bytes, stream)
PyObject* copy(PyObject*, PyObject* const* args, Py_ssize_t count) {
    uint64_t words[5];
    if (count != 5) return PyErr_Format(PyExc_TypeError, "copy takes 5 numbers");
    for (int i = 0; i < 5; ++i) words[i] = PyLong_AsUnsignedLongLong(args[i]);
    if (PyErr_Occurred()) return nullptr;
    const Result result = reinterpret_cast<Copy>(words[0])(words[1], words[2], words[3],
                                                           reinterpret_cast<void*>(words[4]));
    if (result != 0) return PyErr_Format(PyExc_RuntimeError, "CUDA error %d when copying", result);
    Py_RETURN_NONE;
}

// start_graph(cuGraphLaunch, graph, stream): the driver's answer, 0 for success.
PyObject* start_graph(PyObject*, PyObject* const* args, Py_ssize_t count) {
    void* words[3];
    if (count != 3) return PyErr_Format(PyExc_TypeError, "start_graph takes 3 numbers");
    for (int i = 0; i < 3; ++i) words[i] = PyLong_AsVoidPtr(args[i]);
    if (PyErr_Occurred()) return nullptr;
    Result result;
    Py_BEGIN_ALLOW_THREADS
    result = reinterpret_cast<StartGraph>(words[0])(words[1], words[2]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(result);
}

PyMethodDef functions[] = {{"tensor", tensor, METH_O, nullptr},
                           {"pointers", pointers, METH_O, nullptr},
                           {"copy", reinterpret_cast<PyCFunction>(copy), METH_FASTCALL, nullptr},
                           {"start_graph", reinterpret_cast<PyCFunction>(start_graph),
                            METH_FASTCALL, nullptr},
                           {"begin_turn", begin_turn, METH_NOARGS, nullptr},
                           {"end_turn", end_turn, METH_NOARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "tw_launch", nullptr, -1, functions,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_tw_launch() {
    data_ptr_name = PyUnicode_InternFromString("data_ptr");
    PyObject* made = PyModule_Create(&module);
    const std::pair<const char*, PyType_Spec*> types[] = {
        {"Kernel", &spec}, {"Function", &function_spec}, {"Entry", &entry_spec},
        {"Replay", &replay_spec}};
    for (const auto& [name, how] : types) {
        PyObject* type = made ? PyType_FromSpec(how) : nullptr;
        if (!type || PyModule_AddObject(made, name, type) < 0) return nullptr;
    }
    return made;
}
