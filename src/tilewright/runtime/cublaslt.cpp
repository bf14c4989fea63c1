// Calls a product of cuBLASLt from Python: one call, no torch headers, no CUDA headers.
// `Matmul(name, otherwise, stream, device, space, keep, words, algorithm, scales, pointers)` is
// called as `matmul(*tensors)`, on torch's current stream. Descriptors and algorithm are made
// before. A pointer that is less aligned than promised sends the call to `otherwise`.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <new>

namespace {

using Multiply = int (*)(void* handle, void* desc, const void* alpha, const void* a, void* a_layout,
                         const void* b, void* b_layout, const void* beta, const void* c,
                         void* c_layout, void* d, void* d_layout, const void* algorithm,
                         void* workspace, size_t workspace_size, void* stream);
using SetAttribute = int (*)(void* desc, int attribute, const void* value, size_t size);
using GetContext = int (*)(void** context);
using PushContext = int (*)(void* context);
using PopContext = int (*)(void** context);
using IsCapturing = int (*)(void* stream, int* status);

constexpr int BIAS_POINTER = 8, CAPTURING = 1;
enum { A, B, C, D, BIAS, POINTERS };

struct Words {  // what Python packs, eight bytes each
    Multiply multiply;
    SetAttribute set_attribute;
    GetContext get_context;  // null for memory of the host
    PushContext push_context;
    PopContext pop_context;
    IsCapturing is_capturing;
    void *context, *handle, *desc, *layouts[4];
    uint64_t workspace, arguments;
};
struct Pointer {  // argument -1: there is none
    int64_t argument, offset, alignment;
};

struct Matmul {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *name, *otherwise, *stream, *device, *space, *keep;
    PyObject* own;  // the workspace on `own_stream`
    void *own_stream, *own_address;
    Words w;
    Pointer pointers[POINTERS];
    char algorithm[64], scales[16];
    uint64_t bias;  // the address in the descriptor
    std::mutex lock;
};

PyObject* data_ptr_name;

bool address(PyObject* tensor, uint64_t* out) {
    PyObject* number = PyObject_CallMethodNoArgs(tensor, data_ptr_name);
    if (!number) return false;
    *out = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *out != UINT64_MAX || !PyErr_Occurred();
}

// Memory the algorithm may write to. While a graph is recorded each call has its own, from the
// graph's pool; otherwise calls of one stream share theirs. `mine` is to be dropped after the call.
bool workspace(Matmul* k, void* stream, void** found, PyObject** mine) {
    int status = 0;
    const bool fresh = k->w.is_capturing && k->w.is_capturing(stream, &status) == 0 &&
                       status == CAPTURING;
    if (!fresh && k->own && k->own_stream == stream) {
        *found = k->own_address;
        return true;
    }
    PyObject* made = PyObject_CallFunction(k->space, "KO", reinterpret_cast<uint64_t>(stream),
                                           fresh ? Py_True : Py_False);
    uint64_t at = 0;
    if (!made || !address(made, &at)) {
        Py_XDECREF(made);
        return false;
    }
    *found = reinterpret_cast<void*>(at);
    if (fresh) {
        *mine = made;
    } else {
        PyObject* before = k->own;
        k->own = made, k->own_stream = stream, k->own_address = *found;
        Py_XDECREF(before);
    }
    return true;
}

int start(Matmul* k, const uint64_t* at, void* space, void* stream) {
    const std::lock_guard<std::mutex> guard(k->lock);
    void* context = nullptr;
    const bool elsewhere = k->w.get_context && (k->w.get_context(&context) != 0 ||
                                                context != k->w.context);
    if (elsewhere) k->w.push_context(k->w.context);
    int result = 0;
    if (k->pointers[BIAS].argument >= 0 && at[BIAS] != k->bias) {
        result = k->w.set_attribute(k->w.desc, BIAS_POINTER, &at[BIAS], 8);
        k->bias = at[BIAS];
    }
    const auto pointer = [&](int i) { return reinterpret_cast<void*>(at[i]); };
    void* const* layouts = k->w.layouts;
    if (result == 0)
        result = k->w.multiply(k->w.handle, k->w.desc, k->scales, pointer(A), layouts[A],
                               pointer(B), layouts[B], k->scales + 8, pointer(C), layouts[C],
                               pointer(D), layouts[D], k->algorithm, space, k->w.workspace, stream);
    if (elsewhere) k->w.pop_context(&context);
    return result;
}

PyObject* call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
    Matmul* k = reinterpret_cast<Matmul*>(self);
    const Py_ssize_t given = PyVectorcall_NARGS(flags);
    if (given != static_cast<Py_ssize_t>(k->w.arguments) || names)
        return PyErr_Format(PyExc_TypeError, "%U takes %zd tensors", k->name,
                            static_cast<Py_ssize_t>(k->w.arguments));
    uint64_t base[POINTERS], at[POINTERS] = {};
    for (Py_ssize_t i = 0; i < given; ++i)
        if (!address(args[i], &base[i])) return nullptr;
    for (int i = 0; i < POINTERS; ++i) {
        const Pointer& p = k->pointers[i];
        if (p.argument < 0) continue;
        at[i] = base[p.argument] + p.offset;
        if (at[i] & (p.alignment - 1))
            return PyObject_Vectorcall(k->otherwise, args, given, nullptr);
    }
    void *stream = nullptr, *space = nullptr;
    if (k->stream != Py_None) {
        PyObject* number = PyObject_CallOneArg(k->stream, k->device);
        if (!number) return nullptr;
        stream = PyLong_AsVoidPtr(number);
        Py_DECREF(number);
        if (!stream && PyErr_Occurred()) return nullptr;
    }
    PyObject* mine = nullptr;
    if (k->w.workspace && !workspace(k, stream, &space, &mine)) return nullptr;
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = start(k, at, space, stream);
    Py_END_ALLOW_THREADS
    Py_XDECREF(mine);
    if (result != 0)
        return PyErr_Format(PyExc_RuntimeError, "cublasLtMatmul gave %d for %U", result, k->name);
    Py_RETURN_NONE;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *name, *otherwise, *stream, *device, *space, *keep;
    const char *words, *algorithm, *scales, *pointers;
    Py_ssize_t sizes[4];
    if (!PyArg_ParseTuple(args, "UOOOOOy#y#y#y#", &name, &otherwise, &stream, &device, &space,
                          &keep, &words, &sizes[0], &algorithm, &sizes[1], &scales, &sizes[2],
                          &pointers, &sizes[3]))
        return nullptr;
    if (sizes[0] != sizeof(Words) || sizes[1] != 64 || sizes[2] != 16 ||
        sizes[3] != sizeof(Pointer) * POINTERS)
        return PyErr_Format(PyExc_ValueError, "Matmul: parts of the wrong size");
    Matmul* k = reinterpret_cast<Matmul*>(type->tp_alloc(type, 0));
    if (!k) return nullptr;
    new (&k->lock) std::mutex;
    memcpy(&k->w, words, sizeof(Words));
    memcpy(k->algorithm, algorithm, 64);
    memcpy(k->scales, scales, 16);
    memcpy(k->pointers, pointers, sizeof(Pointer) * POINTERS);
    k->name = name, k->otherwise = otherwise, k->stream = stream, k->device = device;
    k->space = space, k->keep = keep, k->call = call;
    for (PyObject* o : {name, otherwise, stream, device, space, keep}) Py_INCREF(o);
    if (k->w.arguments > POINTERS) {
        Py_DECREF(k);
        return PyErr_Format(PyExc_ValueError, "Matmul: at most %d tensors", POINTERS);
    }
    return reinterpret_cast<PyObject*>(k);
}

void drop(PyObject* self) {
    Matmul* k = reinterpret_cast<Matmul*>(self);
    PyTypeObject* type = Py_TYPE(self);
    for (PyObject* o : {k->name, k->otherwise, k->stream, k->device, k->space, k->keep, k->own})
        Py_XDECREF(o);
    k->lock.~mutex();
    type->tp_free(self);
    Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Matmul, call), READONLY, nullptr},
    {"name", T_OBJECT, offsetof(Matmul, name), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(drop)},
                       {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_members, members},
                       {0, nullptr}};
PyType_Spec spec = {"tw_cublaslt.Matmul", sizeof(Matmul), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "tw_cublaslt", nullptr, -1, nullptr,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_tw_cublaslt() {
    data_ptr_name = PyUnicode_InternFromString("data_ptr");
    PyObject* made = PyModule_Create(&module);
    PyObject* type = PyType_FromSpec(&spec);
    if (!made || !type || PyModule_AddObject(made, "Matmul", type) < 0) return nullptr;
    return made;
}
