// Launches kernels of the CUDA driver from Python: one call, no torch headers, no CUDA headers.
// `Kernel(name, otherwise, function, context, kinds, warps, shared, flags, clusters, launch,
// launch_ex, set_context)` is called as `kernel(stream, x, y, z, *arguments)`. An argument whose
// kind is a capital letter must be a multiple of 16; if it is not, `otherwise` is called instead.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstdint>
#include <cstring>

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
constexpr Result INVALID_CONTEXT = 201;

struct Kernel {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject* name;
    PyObject* otherwise;
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
        case 'p': case 'P': {
            PyObject* number = value;
            if (value == Py_None) return true;
            if (!PyLong_Check(value)) {
                number = PyObject_CallMethodNoArgs(value, data_ptr_name);
                if (!number) return false;
            } else {
                Py_INCREF(number);
            }
            *out = PyLong_AsUnsignedLongLong(number);
            Py_DECREF(number);
            break;
        }
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
    for (int d = 0; d < 3; ++d) grid[d] = (unsigned)PyLong_AsUnsignedLongLong(args[1 + d]);
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
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) Py_RETURN_NONE;
    Result result;
    Py_BEGIN_ALLOW_THREADS
    result = start(k, grid, stream, params);
    if (result == INVALID_CONTEXT && k->set_context(k->context) == 0)  // a thread new to CUDA
        result = start(k, grid, stream, params);
    Py_END_ALLOW_THREADS
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
    Py_XDECREF(k->name), Py_XDECREF(k->otherwise);
    type->tp_free(self);
    Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Kernel, call), READONLY, nullptr},
    {"name", T_OBJECT, offsetof(Kernel, name), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(drop)},
                       {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_members, members},
                       {0, nullptr}};
PyType_Spec spec = {"tw_launch.Kernel", sizeof(Kernel), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};

// pointers(arguments): the address of each tensor, 0 for what is none.
PyObject* pointers(PyObject*, PyObject* list) {
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "pointers takes a list");
    const Py_ssize_t count = PyList_GET_SIZE(list);
    PyObject* found = PyTuple_New(count);
    for (Py_ssize_t i = 0; found && i < count; ++i) {
        PyObject* item = PyList_GET_ITEM(list, i);
        PyObject* number = PyLong_Check(item) || PyFloat_Check(item) || item == Py_None
                               ? PyLong_FromLong(0)
                               : PyObject_CallMethodNoArgs(item, data_ptr_name);
        if (!number) Py_CLEAR(found);
        else PyTuple_SET_ITEM(found, i, number);
    }
    return found;
}

// copy(cuMemcpyDtoDAsync, to, from, bytes, stream)
PyObject* copy(PyObject*, PyObject* const* args, Py_ssize_t count) {
    uint64_t words[5];
    if (count != 5) return PyErr_Format(PyExc_TypeError, "copy takes 5 numbers");
    for (int i = 0; i < 5; ++i) words[i] = PyLong_AsUnsignedLongLong(args[i]);
    if (PyErr_Occurred()) return nullptr;
    using Copy = Result (*)(uint64_t, uint64_t, size_t, void*);
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
    using Start = Result (*)(void*, void*);
    Result result;
    Py_BEGIN_ALLOW_THREADS
    result = reinterpret_cast<Start>(words[0])(words[1], words[2]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(result);
}

PyMethodDef functions[] = {{"pointers", pointers, METH_O, nullptr},
                           {"copy", reinterpret_cast<PyCFunction>(copy), METH_FASTCALL, nullptr},
                           {"start_graph", reinterpret_cast<PyCFunction>(start_graph),
                            METH_FASTCALL, nullptr},
                           {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "tw_launch", nullptr, -1, functions,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_tw_launch() {
    data_ptr_name = PyUnicode_InternFromString("data_ptr");
    PyObject* made = PyModule_Create(&module);
    PyObject* type = PyType_FromSpec(&spec);
    if (!made || !type || PyModule_AddObject(made, "Kernel", type) < 0) return nullptr;
    return made;
}
