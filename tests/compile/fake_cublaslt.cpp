// A stand-in for cuBLASLt on memory of the host: it checks what the library would check, records
// what it is told, and multiplies in float64. Element types: f32, f64, bf16, i8, i32.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>

namespace {

constexpr int INVALID = 7, UNSUPPORTED = 15;
enum { F32 = 0, F64 = 1, I8 = 3, I32 = 10, BF16 = 14 };

struct Desc { int compute, scale; std::map<int, uint64_t> set; };
struct Layout { int type; uint64_t rows, cols; int64_t ld, batch = 1, step = 0; };
struct Preference { std::map<int, uint64_t> set; };
struct Algo { uint64_t data[8]; };
struct Result { Algo algo; size_t workspace; int state; float waves; int reserved[4]; };
static_assert(sizeof(Result) == 96);

const std::map<int, size_t> DESC_SIZES = {{3, 4}, {4, 4}, {7, 4}, {8, 8}, {10, 8}};
const std::map<int, size_t> PREFERENCE_SIZES = {{1, 8}, {3, 4}, {5, 4}, {6, 4}, {7, 4}, {8, 4}};
constexpr size_t SPACES[] = {0, 1024, 4096, 64u << 20};
constexpr uint64_t MAGIC = 0x1234567800000000;

int alive, asked, multiplied, fail_next, offered = 3, most_splits = 0;
std::map<int, uint64_t> last_preference, last_desc;
Layout last_layouts[4];
void *last_workspace;
size_t last_workspace_size;

int put(std::map<int, uint64_t>& to, const std::map<int, size_t>& sizes, int attribute,
        const void* value, size_t size) {
    const auto known = sizes.find(attribute);
    if (known == sizes.end() || known->second != size || !value) return INVALID;
    uint64_t word = 0;
    memcpy(&word, value, size);
    to[attribute] = word;
    return 0;
}

size_t width(int type) { return type == F64 ? 8 : type == BF16 ? 2 : type == I8 ? 1 : 4; }
bool is_known(int type) {
    return type == F32 || type == F64 || type == BF16 || type == I8 || type == I32;
}

double get(const void* base, int type, int64_t i) {
    switch (type) {
        case F32: return static_cast<const float*>(base)[i];
        case F64: return static_cast<const double*>(base)[i];
        case I8: return static_cast<const int8_t*>(base)[i];
        case I32: return static_cast<const int32_t*>(base)[i];
    }
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(base)[i]) << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

void put(void* base, int type, int64_t i, double value) {
    if (type == F32) static_cast<float*>(base)[i] = static_cast<float>(value);
    if (type == F64) static_cast<double*>(base)[i] = value;
    if (type == I32) static_cast<int32_t*>(base)[i] = static_cast<int32_t>(value);
    if (type != BF16) return;
    const float narrow = static_cast<float>(value);
    uint32_t bits;
    memcpy(&bits, &narrow, 4);
    static_cast<uint16_t*>(base)[i] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to even
}

double scale(const Desc* desc, const void* at) { return get(at, desc->scale, 0); }

bool is_sound(const Layout* x) {
    return is_known(x->type) && x->rows && x->cols && x->ld >= static_cast<int64_t>(x->rows);
}

int check(const Desc* d, const Layout* a, const Layout* b, const Layout* c, const Layout* out) {
    for (const Layout* x : {a, b, c, out})
        if (!is_sound(x) || x->batch != out->batch) return INVALID;
    const bool ta = d->set.count(3) && d->set.at(3), tb = d->set.count(4) && d->set.at(4);
    const uint64_t m = ta ? a->cols : a->rows, k = ta ? a->rows : a->cols;
    const uint64_t k2 = tb ? b->cols : b->rows, n = tb ? b->rows : b->cols;
    if (k != k2 || m != out->rows || n != out->cols || c->rows != m || c->cols != n) return INVALID;
    if (a->type != b->type || c->type != out->type) return UNSUPPORTED;
    const int compute = a->type == F64 ? 70 : a->type == I8 ? 72 : d->compute == 77 ? 77 : 68;
    if (d->compute != compute) return UNSUPPORTED;
    const uint64_t epilogue = d->set.count(7) ? d->set.at(7) : 1;
    if (epilogue != 1 && (epilogue & ~(2 | 4 | 32))) return UNSUPPORTED;
    if ((epilogue & 4) && epilogue != 1 && !d->set.count(8)) return INVALID;
    return 0;
}

}  // namespace

extern "C" {

size_t cublasLtGetVersion() { return 990001; }
int cublasLtCreate(void** handle) { *handle = &alive; return 0; }

int cublasLtMatmulDescCreate(void** made, int compute, int scale) {
    *made = new Desc{compute, scale, {}}, ++alive;
    return 0;
}
int cublasLtMatmulDescDestroy(void* desc) { delete static_cast<Desc*>(desc), --alive; return 0; }
int cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* value, size_t size) {
    return put(static_cast<Desc*>(desc)->set, DESC_SIZES, attribute, value, size);
}

int cublasLtMatrixLayoutCreate(void** made, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    *made = new Layout{type, rows, cols, ld}, ++alive;
    return 0;
}
int cublasLtMatrixLayoutDestroy(void* x) { delete static_cast<Layout*>(x), --alive; return 0; }
int cublasLtMatrixLayoutSetAttribute(void* x, int attribute, const void* value, size_t size) {
    Layout* layout = static_cast<Layout*>(x);
    if (attribute == 5 && size == 4) layout->batch = *static_cast<const int32_t*>(value);
    else if (attribute == 6 && size == 8) layout->step = *static_cast<const int64_t*>(value);
    else return INVALID;
    return 0;
}

int cublasLtMatmulPreferenceCreate(void** made) { *made = new Preference, ++alive; return 0; }
int cublasLtMatmulPreferenceDestroy(void* p) {
    delete static_cast<Preference*>(p), --alive;
    return 0;
}
int cublasLtMatmulPreferenceSetAttribute(void* p, int attribute, const void* value, size_t size) {
    return put(static_cast<Preference*>(p)->set, PREFERENCE_SIZES, attribute, value, size);
}

int cublasLtMatmulAlgoGetHeuristic(void* handle, void* desc, void* a, void* b, void* c, void* d,
                                   void* preference, int count, Result* results, int* returned) {
    ++asked;
    if (handle != &alive || count <= 0) return INVALID;
    const int wrong = check(static_cast<Desc*>(desc), static_cast<Layout*>(a),
                            static_cast<Layout*>(b), static_cast<Layout*>(c),
                            static_cast<Layout*>(d));
    if (wrong) return wrong;
    last_preference = static_cast<Preference*>(preference)->set;
    for (*returned = 0; *returned < count && *returned < offered; ++*returned) {
        Result& r = results[*returned];
        memset(&r, 0, sizeof r);
        r.algo.data[0] = MAGIC + *returned, r.algo.data[7] = 0xff00ff00ff00ff00;
        r.workspace = SPACES[*returned];
    }
    return 0;
}

int cublasLtMatmulAlgoCheck(void* handle, void* desc, void* a, void* b, void* c, void* d,
                            const Algo* algo, Result* result) {
    if (handle != &alive || (algo->data[0] & ~0xffull) != MAGIC) return INVALID;
    if (algo->data[2] > 4 || (algo->data[2] > 1 && algo->data[3] != 2)) return UNSUPPORTED;
    const int wrong = check(static_cast<Desc*>(desc), static_cast<Layout*>(a),
                            static_cast<Layout*>(b), static_cast<Layout*>(c),
                            static_cast<Layout*>(d));
    if (!wrong) result->workspace = SPACES[algo->data[0] & 3];
    return wrong;
}

int cublasLtMatmulAlgoConfigGetAttribute(const Algo* algo, int attribute, void* value, size_t size,
                                         size_t* written) {
    if (attribute > 8 || size != (attribute >= 7 ? 2 : 4)) return INVALID;
    const uint32_t found = attribute == 0 ? 40 + (algo->data[0] & 0xff)
                           : attribute == 2 ? algo->data[2]
                                            : attribute;
    memcpy(value, &found, size);
    *written = size;
    return 0;
}

// Splits and reduction schemes alone can be chosen, where a test allows it.
int cublasLtMatmulAlgoConfigSetAttribute(Algo* algo, int attribute, const void* value,
                                         size_t size) {
    if (!most_splits || size != 4 || (attribute != 2 && attribute != 3)) return INVALID;
    uint32_t number;
    memcpy(&number, value, 4);
    if (attribute == 2 && number > static_cast<uint32_t>(most_splits)) return INVALID;
    algo->data[attribute] = number;
    return 0;
}

int cublasLtMatmul(void* handle, void* desc_, const void* alpha_, const void* a, void* a_layout,
                   const void* b, void* b_layout, const void* beta_, const void* c, void* c_layout,
                   void* d, void* d_layout, const Algo* algo, void* workspace, size_t space,
                   void* stream) {
    const Desc* desc = static_cast<Desc*>(desc_);
    const Layout la = *static_cast<Layout*>(a_layout), lb = *static_cast<Layout*>(b_layout),
                 lc = *static_cast<Layout*>(c_layout), ld = *static_cast<Layout*>(d_layout);
    if (fail_next) { const int code = fail_next; fail_next = 0; return code; }
    if (handle != &alive || (algo->data[0] & ~0xffull) != MAGIC || stream) return INVALID;
    if (algo->data[7] != 0xff00ff00ff00ff00) return INVALID;
    const size_t needed = SPACES[algo->data[0] & 3];
    if (space < needed || (needed && !workspace)) return INVALID;
    if (needed) memset(workspace, 0xff, needed);
    const int wrong = check(desc, &la, &lb, &lc, &ld);
    if (wrong) return wrong;
    ++multiplied;
    last_desc = desc->set, last_workspace = workspace, last_workspace_size = space;
    last_layouts[0] = la, last_layouts[1] = lb, last_layouts[2] = lc, last_layouts[3] = ld;
    const uint64_t epilogue = desc->set.at(7);
    const bool ta = desc->set.at(3), tb = desc->set.at(4);
    const double alpha = scale(desc, alpha_), beta = scale(desc, beta_);
    const int64_t inner = ta ? la.rows : la.cols;
    for (int64_t z = 0; z < ld.batch; ++z)
        for (uint64_t j = 0; j < ld.cols; ++j)
            for (uint64_t i = 0; i < ld.rows; ++i) {
                double total = 0;
                for (int64_t k = 0; k < inner; ++k)
                    total += get(a, la.type, z * la.step + (ta ? k + i * la.ld : i + k * la.ld)) *
                             get(b, lb.type, z * lb.step + (tb ? j + k * lb.ld : k + j * lb.ld));
                total *= alpha;
                if (beta != 0) total += beta * get(c, lc.type, z * lc.step + i + j * lc.ld);
                if (epilogue != 1 && (epilogue & 4)) {
                    const int64_t step = desc->set.count(10) ? desc->set.at(10) : 0;
                    total += get(reinterpret_cast<void*>(desc->set.at(8)), ld.type, z * step + i);
                }
                if (epilogue & 2) total = total > 0 ? total : 0;
                if (epilogue & 32)
                    total *= 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) *
                                                  (total + 0.044715 * total * total * total)));
                put(d, ld.type, z * ld.step + i + j * ld.ld, total);
            }
    return 0;
}

int fake_alive() { return alive; }
int fake_asked() { return asked; }
int fake_multiplied() { return multiplied; }
void fake_fail(int code) { fail_next = code; }
void fake_offer(int count) { offered = count; }
void fake_splits(int most) { most_splits = most; }
uint64_t fake_preference(int attribute) { return last_preference[attribute]; }
uint64_t fake_desc(int attribute) { return last_desc[attribute]; }
int64_t fake_ld(int which) { return last_layouts[which].ld; }
uint64_t fake_workspace() { return reinterpret_cast<uint64_t>(last_workspace); }
size_t fake_workspace_size() { return last_workspace_size; }
}
