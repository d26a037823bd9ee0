/**
 * @file mha.h
 * libmha: multi-head attention on the CPU, every product of float32 matrices a CBLAS call (unless a
 * context asks for another engine, MHA_ENGINE_XSMM; few rows times numbers that are stored smaller,
 * which CBLAS has no product for, are multiplied by the library itself).
 *
 * What it computes, in five steps:
 *
 *   1. project       Q = query·Wq + bq,  K = key·Wk + bk,  V = value·Wv + bv
 *   2. split         head h of Q is the column block [h·d, (h+1)·d): a stride, never a copy
 *   3. attend        O_h = softmax(scale·Q_h·K_gᵀ)·V_g with g = h / (H/G), for every head h
 *   4. concatenate   O_h lies in its own column block of one buffer: again a stride
 *   5. project out   output = concat·Wo + bo
 *
 * ("Attention Is All You Need", 2017, section 3.2.2; grouped heads after "GQA: Training Generalized
 * Multi-Query Transformer Models from Multi-Head Checkpoints", 2023.)
 *
 * Letters, used here and in every message:
 *
 *   B  batch entries                  H  query heads
 *   Lq length of the query            G  key/value heads, H mod G = 0
 *   Lk length of the keys             d  size of a query/key head
 *   Eq Ek Ev  widths of the inputs    dv size of a value head
 *   Eo width of the output
 *
 * Widths, head counts and head sizes are independent: H·d need not equal Eq. All numbers are
 * float32 (matrices and caches may be kept smaller, see mha_element), row-major; the last dimension
 * of every array has stride 1. Dimensions, lengths,
 * offsets and strides are int64_t and count elements; sizes that end in _bytes are size_t. Arrays
 * are aligned as their elements are. Whether two overlap is judged by their address ranges, from
 * the first element to the last.
 *
 * Short use:
 *
 *     mha_config config;
 *     mha_config_init(&config, 512, 8);                  // Eq = 512, H = 8
 *     mha_matrices matrices;
 *     MHA_INIT(&matrices);
 *     matrices.orientation = MHA_IN_OUT;                 // y = x·W
 *     matrices.query = w_q; matrices.key = w_k; matrices.value = w_v; matrices.output = w_o;
 *
 *     mha_weights *weights = NULL;
 *     mha_context *context = NULL;
 *     mha_error error;
 *     if (mha_weights_create(&config, &matrices, &weights, &error) ||
 *         mha_context_create(NULL, &context, &error) ||
 *         mha_self_attention(context, weights, x, 1, 7, output, &error))
 *       fprintf(stderr, "%s\n", error.message);
 *     mha_context_destroy(context);
 *     mha_weights_destroy(weights);
 *
 * Names: mha_<noun>_<verb>. create and destroy allocate and free, every destroy accepts NULL,
 * counts begin with n_ or are one of the letters.
 *
 * Structs of arguments begin with their own size: MHA_INIT(&s) zeroes s and sets it. Zero means
 * bidirectional, no mask, default scale. What zero cannot say counts only when its bit is set in
 * `flags`. A library older than your header accepts your struct as long as what it does not know
 * is zero.
 *
 * Errors: every function that can fail returns an mha_status and must be checked. The optional
 * mha_error belongs to the caller and holds a message that names the argument, the value received
 * and the rule; it is written on every return, success included. Errors are found before anything
 * is written: on failure outputs are as they were. The library never prints, exits or aborts. Where
 * a thread cannot be started, or the BLAS takes no further one (OpenBLAS was built for a largest
 * number, MAX_THREADS in mha_build_info, and maps 128 MiB of address space for each), it works with
 * the threads that there are; where the BLAS has no memory for one, the call is MHA_ERROR_MEMORY.
 *
 * Threads: mha_weights may be used from any number of threads at once. mha_context serves one
 * caller at a time; a second entry is MHA_ERROR_BUSY. Give each thread a context of its own. A
 * mha_cache has any number of readers or one writer.
 *
 * Callbacks (allocator, parallel_for, trace, release): they must return. One that leaves by
 * longjmp, or in C++ by an exception, leaves the context inside its call for ever (MHA_ERROR_BUSY),
 * a cache too, and the BLAS at one thread: catch everything in the callback and keep it for after
 * the call. In a coroutine, a callback must not suspend. A call needs some 100 KiB of the caller's
 * stack, most of it for the BLAS (75 to 84 KiB were measured).
 *
 * BLAS: while a call computes, OpenBLAS's pthread flavour (BLIS too) is held at one thread for the
 * whole process, because many small products run faster on the library's own threads; the count is
 * restored when the last such call ends, unless somebody set another one meanwhile. With OpenBLAS's
 * OpenMP flavour only the calling thread's OpenMP setting is held and restored. The context flag
 * MHA_LEAVE_BLAS_ALONE opts out. OpenBLAS's serial flavour is not safe to enter from two threads:
 * there the library uses one thread and a process-wide lock around every product of its own; your
 * program's products at the same time are not protected.
 *
 * Promised: the same call gives the same bits, whatever the number of threads, within one process,
 * one BLAS, one core type and one engine, while nobody else changes the BLAS's thread count during
 * the call.
 * Not promised: the same bits across versions, machines or BLAS libraries, nor between two
 * spellings of one mask; those agree within rounding.
 */
#ifndef MHA_H
#define MHA_H

#include <stddef.h>
#include <stdint.h>

/** Release of this header; mha_version() tells that of the library. @{ */
#define MHA_VERSION_MAJOR  0
#define MHA_VERSION_MINOR  1
#define MHA_VERSION_PATCH  0
#define MHA_VERSION_STRING "0.1.0"
/** @} */

/** The release as one number that grows with it: 10000·major + 100·minor + patch. */
#define MHA_VERSION_NUMBER 100

/** Marks what the library exports. */
#if defined(MHA_STATIC)
#define MHA_API
#elif defined(_WIN32) && defined(MHA_BUILDING)
#define MHA_API __declspec(dllexport)
#elif defined(_WIN32)
#define MHA_API __declspec(dllimport)
#elif defined(__GNUC__)
#define MHA_API __attribute__((visibility("default")))
#else
#define MHA_API
#endif

/** Marks functions whose status must not be dropped. */
#if defined(__GNUC__)
#define MHA_MUST_CHECK __attribute__((warn_unused_result))
#else
#define MHA_MUST_CHECK
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Statuses and errors -------------------------------------------------------------------- */

/** What a call came to. Each error is one class of mistake; the message tells the case. */
typedef enum mha_status {
  MHA_OK = 0,
  MHA_ERROR_NULL = 1,          /**< a pointer that must be given is NULL */
  MHA_ERROR_STRUCT_SIZE = 2,   /**< struct_size too small or too large (MHA_INIT was forgotten), or
                                    an unknown tail that is not zero */
  MHA_ERROR_SIZE = 3,          /**< a dimension is zero, negative, or does not fit another */
  MHA_ERROR_HEADS = 4,         /**< H mod G ≠ 0, or a width that H does not divide */
  MHA_ERROR_STRIDE = 5,        /**< a stride or leading dimension that no product can take */
  MHA_ERROR_OVERFLOW = 6,      /**< sizes whose product overflows, or exceeds the BLAS's integer */
  MHA_ERROR_VALUE = 7,         /**< a number, flag or enumerator outside its allowed set */
  MHA_ERROR_LENGTH = 8,        /**< a length, offset or position outside its range */
  MHA_ERROR_WEIGHTS = 9,       /**< a matrix or tensor is missing, ambiguous or does not fit */
  MHA_ERROR_OVERLAP = 10,      /**< an output overlaps an input, another output or itself */
  MHA_ERROR_BUSY = 11,         /**< the context is inside another call */
  MHA_ERROR_MEMORY = 12,       /**< the allocator returned NULL */
  MHA_ERROR_UNSUPPORTED = 13,  /**< legal, but this version does not compute it */
  MHA_ERROR_IO = 14,           /**< a file cannot be opened, read or written */
  MHA_ERROR_FORMAT = 15,       /**< a file's content breaks its format */
  MHA_ERROR_COMMUNICATION = 16 /**< of libmha_mpi alone: MPI reports a failure */
} mha_status;

/** Bytes of mha_error.message, the terminating zero included; longer messages are cut. */
#define MHA_ERROR_MESSAGE_BYTES 512

/**
 * A caller-owned error: filled by every function that takes one, on success too (MHA_OK and an
 * empty message). May be NULL wherever it is a parameter. It holds no resource.
 */
typedef struct mha_error {
  mha_status status;                     /**< the class of mistake, or MHA_OK */
  char message[MHA_ERROR_MESSAGE_BYTES]; /**< one English sentence, zero-terminated UTF-8 */
} mha_error;

/** The enumerator's name, such as "MHA_ERROR_NULL"; "unknown status" for any other value. */
MHA_API const char *mha_status_name(mha_status status);

/** Zeroes the `bytes` bytes at `structure` and stores `bytes` in the size_t that it begins with.
 *  Use MHA_INIT, which passes the right size. */
MHA_API void mha_struct_init(void *structure, size_t bytes);

/** The largest struct_size that is accepted, in any release: what a struct holds that nobody
 *  prepared is hardly ever smaller, and is then refused as MHA_ERROR_STRUCT_SIZE. */
#define MHA_MAX_STRUCT_BYTES 4096

/** Prepares any of this header's structs that begin with struct_size: MHA_INIT(&args), before any
 *  of its members is set. The others, mha_tensor and mha_allocator, begin as {0}; there MHA_INIT
 *  does not compile. */
#define MHA_INIT(structure)                                                                        \
  mha_struct_init((structure), sizeof *(structure) + 0 * sizeof(structure)->struct_size)

/* ---- Memory --------------------------------------------------------------------------------- */

/**
 * Where an object takes its memory from. `allocate` returns `bytes` bytes aligned to `alignment`
 * (a power of two, at most 64) or NULL; `release` takes back what it returned, with the same
 * `bytes`. If one of them is NULL, the C library's serve. Both are called on the thread that
 * entered the library, never from a worker, and must not enter the same context. Copied on
 * creation; `user` must outlive the object.
 */
typedef struct mha_allocator {
  void *user;                                                    /**< passed to both functions */
  void *(*allocate)(void *user, size_t bytes, size_t alignment); /**< gives memory */
  void (*release)(void *user, void *memory, size_t bytes);       /**< takes it back */
} mha_allocator;

/* ---- Numbers --------------------------------------------------------------------------------- */

/**
 * How the numbers of an array are stored, each array on its own: matrices as any of them, keys and
 * values (mha_cache, and those given to mha_attend) as any but MHA_Q4_0, everything else as
 * MHA_F32. An element's value is exactly what its format says; products and sums are float32, and
 * activations are not rounded, so a result is that of float32 arrays with those values.
 *
 * The types with blocks keep 32 numbers that follow one another along the stored dimension of
 * stride 1 (a row of a matrix, a head of a key) together with one scale. There sizes, strides and
 * leading dimensions still count elements, and have to be multiples of 32; pointers are those of
 * the first block. Numbers need to be aligned as a float is in MHA_F32, not at all in the others;
 * those of more than one byte are in the machine's byte order.
 */
typedef enum mha_element {
  MHA_F32 = 0,  /**< float, 32 bits */
  MHA_F16 = 1,  /**< IEEE 754 binary16 */
  MHA_BF16 = 2, /**< the upper half of a float */
  MHA_Q8_0 = 3, /**< 34 bytes for 32 numbers: an F16 scale, then 32 signed bytes q; value = scale·q
                     (GGUF's Q8_0) */
  MHA_Q4_0 = 4  /**< 18 bytes for 32 numbers: an F16 scale, then 16 bytes, whose low halves q are
                     elements 0 to 15 and high halves 16 to 31; value = scale·(q − 8) (GGUF's Q4_0)
                     */
} mha_element;

/** The type's name as files spell it, such as "BF16" or "Q8_0"; "unknown type" for other values. */
MHA_API const char *mha_element_name(int32_t element);

/** Bytes of n numbers. 0 where n is 0 or less, no multiple of the type's block, or too large, and
 *  for values that are no mha_element. */
MHA_API size_t mha_element_bytes(int32_t element, int64_t n);

/**
 * Converts n numbers from one type to another: to float32 exactly, otherwise rounded once, to
 * nearest even. What is too large for MHA_F16 becomes infinite; NaN stays NaN. MHA_Q8_0: the scale
 * is max|x|/127, rounded to F16, and q is x/scale, rounded half away from zero. MHA_Q4_0: the scale
 * is −x/8 of the x with the largest magnitude, rounded to F16, and q is x/scale + 8, likewise,
 * within 0 to 15. A block with a NaN or an infinity in it, or whose scale exceeds F16, becomes NaN
 * as a whole. Numbers of the same type are copied as they are.
 * @param from   mha_element of source.
 * @param source n numbers; not NULL unless n is 0.
 * @param to     mha_element of target.
 * @param target room for n numbers, not NULL unless n is 0; must not overlap source.
 * @param n      at least 0, whole blocks of both types.
 * @param error  receives the outcome, or NULL.
 * Thread rule: touches its arguments alone, on the calling thread.
 * Errors: NULL, SIZE, VALUE (no mha_element), OVERFLOW, OVERLAP; nothing is written then.
 */
MHA_API MHA_MUST_CHECK mha_status mha_element_convert(int32_t from, const void *source, int32_t to,
                                                      void *target, int64_t n, mha_error *error);

/**
 * A view of [batch][length][heads][size] numbers. With all four strides 0 it is dense in that
 * order; otherwise each counts as given where its extent exceeds 1, size_stride 1 and row_stride at
 * least size. [B][H][L][d] is row_stride d, head_stride L·d; one of the three in a packed
 * [B][L][3][H][d] is row_stride 3·H·d. Batch and head stride may be 0 (the same for all). The size
 * dimension must have stride 1. Begins as {0}.
 */
typedef struct mha_tensor {
  const void *data;     /**< element (0, 0, 0, 0) */
  int64_t batch;        /**< B; with packed input 1, length = all rows */
  int64_t length;       /**< Lq or Lk */
  int64_t heads;        /**< H or G */
  int64_t size;         /**< d or dv */
  int64_t batch_stride; /**< elements from one batch entry to the next */
  int64_t row_stride;   /**< from one row to the next */
  int64_t head_stride;  /**< from one head to the next */
  int64_t size_stride;  /**< 1, or 0 if all are 0 */
  int32_t element;      /**< mha_element of data */
  int32_t reserved;     /**< 0 */
} mha_tensor;

/* ---- Weights: one layer ---------------------------------------------------------------------- */

/**
 * Where Q and K are normalised before the rotary positions: each head of each row, or the row over
 * all heads, becomes x / sqrt(mean(x²) + eps)·weight ("Root Mean Square Layer Normalization",
 * 2019).
 */
typedef enum mha_norm {
  MHA_NORM_NONE = 0,
  MHA_NORM_PER_HEAD = 1, /**< over the d elements of each head; one weight [d] for all heads */
  MHA_NORM_FULL = 2      /**< over the H·d elements of a row of Q, the G·d of a row of K */
} mha_norm;

/**
 * Which elements of a head turn together by the rotary positions ("RoFormer", 2021). Pair p of
 * rotary_size/2 is (a, b) and becomes (a·cos − b·sin, b·cos + a·sin) by the angle
 * position·rope_base^(−2p/rotary_size). There is no default: the wrong choice is silent.
 */
typedef enum mha_rope {
  MHA_ROPE_NONE = 0,
  MHA_ROPE_HALVES = 1,     /**< elements p and p + rotary_size/2: Hugging Face's Llama, GPT-NeoX */
  MHA_ROPE_INTERLEAVED = 2 /**< elements 2p and 2p + 1: the paper, GPT-J, Meta's Llama */
} mha_rope;

/**
 * One layer's sizes and score rule. Sizes left 0 are derived: n_kv_heads = H, head_size = Eq/H,
 * value_head_size = head_size, the widths = Eq, or what an absent matrix forces (its step is the
 * identity). A remainder, or a size that cannot be derived, is an error.
 */
typedef struct mha_config {
  size_t struct_size;      /**< set by mha_config_init or MHA_INIT */
  uint32_t flags;          /**< MHA_SCALE | MHA_PACK_WEIGHTS | MHA_KEEP_TYPE, as they apply */
  float scale;             /**< factor of q·k when MHA_SCALE is set, 0 and negative included;
                                otherwise 1/√d */
  float softcap;           /**< c of c·tanh(s/c), at least 0; 0 = none */
  int64_t n_heads;         /**< H, at least 1 */
  int64_t n_kv_heads;      /**< G; query head h uses key/value head h / (H/G) */
  int64_t head_size;       /**< d */
  int64_t value_head_size; /**< dv */
  int64_t query_width;     /**< Eq */
  int64_t key_width;       /**< Ek */
  int64_t value_width;     /**< Ev */
  int64_t output_width;    /**< Eo */
  int32_t norm;            /**< mha_norm of Q and K */
  float norm_epsilon;      /**< eps, greater than 0 where norm is set */
  int32_t rope;            /**< mha_rope: rotary positions in mha_forward */
  int32_t reserved;        /**< 0 */
  int64_t rotary_size;     /**< elements of each head that turn, even; the rest passes; 0 = d */
  double rope_base;        /**< greater than 0, or 0 = 10000; not used with tables */
  int64_t rope_positions;  /**< rows of the tables */
  const float *rope_cos; /**< [rope_positions][rotary_size/2] or NULL = computed in double; used */
  const float *rope_sin; /**< as given. Both or none; not copied: as with MHA_BORROW */
  const mha_allocator *allocator; /**< for the weights object; NULL = the C library */
} mha_config;

/** Bit of flags in mha_config and mha_rules: `scale` counts. */
#define MHA_SCALE UINT32_C(1)

/** Bit of mha_config.flags: the layer also keeps its matrices packed for MHA_ENGINE_XSMM, whose
 *  products with a matrix that is not packed are as in MHA_ENGINE_BLAS. Costs the matrices' memory
 *  once more, as float32 whatever their types are
 *  (columns of W rounded up to 64), from the layer's allocator, beside what is copied, borrowed or
 *  mapped. Where that engine cannot be had, the flag is MHA_ERROR_UNSUPPORTED. */
#define MHA_PACK_WEIGHTS UINT32_C(64)

/** Bit of mha_config.flags, for loading: matrices of a file that are MHA_F16, MHA_BF16, MHA_Q8_0 or
 *  MHA_Q4_0 are used where they lie, each in its own type, rather than converted to float32. Those
 *  in the other byte order or column-major are converted all the same, and so is a packed matrix of
 *  MHA_IN_OUT whose q, k and v do not begin with whole blocks. Biases, norms and sinks are float32
 *  always. Arrays in memory are as mha_matrices says, with or without it. */
#define MHA_KEEP_TYPE UINT32_C(128)

/** Zeroes `config`, stores struct_size, Eq = model_width and H = n_heads. Checks none of them:
 *  mha_weights_create does. Does nothing where config is NULL or struct_size too small for one.
 *  Use the macro mha_config_init, which passes the size. */
MHA_API void mha_config_init_sized(mha_config *config, size_t struct_size, int64_t model_width,
                                   int64_t n_heads);
/** mha_config_init(&config, model_width, n_heads): the usual start. */
#define mha_config_init(config, model_width, n_heads)                                              \
  mha_config_init_sized((config), sizeof *(config), (model_width), (n_heads))

/** How a matrix lies in memory. There is no default: square matrices cannot tell. */
typedef enum mha_orientation {
  MHA_IN_OUT = 1, /**< W [in][out], y = x·W: NumPy, Keras, GPT-2 Conv1D, com.microsoft.Attention */
  MHA_OUT_IN = 2  /**< W [out][in], y = x·Wᵀ: PyTorch, Hugging Face */
} mha_orientation;

/**
 * Who keeps the numbers of mha_matrices. Borrowed numbers may change between calls, as an optimizer
 * changes them, while no call on any thread uses the layer: the next one computes with what it
 * finds there, as a layer made anew would. That goes for matrices, biases, norm weights and sinks,
 * and for the rotary tables, which are borrowed always. Nothing that is made of them is kept, but
 * for what MHA_PACK_WEIGHTS packs, which does not change with them; what is kept is the config,
 * with the scale and the frequencies that follow from it. What creation checks, that no sink is NaN
 * or +inf, is not checked again.
 */
typedef enum mha_ownership {
  MHA_COPY = 0,  /**< the weights object copies them; yours may go after mha_weights_create */
  MHA_BORROW = 1 /**< the weights object points to yours: alive until its end, and unchanged while a
                      call uses them */
} mha_ownership;

/** Gives back what `user` stands for, the allocator of the object included: nothing of it is used
 *  afterwards. It is called once and must not enter the library. */
typedef void mha_release_function(void *user);

/**
 * One layer's numbers. Shapes are given for MHA_IN_OUT; with MHA_OUT_IN both dimensions change
 * places. Either goes to BLAS as it lies. A leading dimension is the distance between rows, 0 =
 * dense, so that one packed block, such as [Eq][3·Eq], serves as three matrices; of a single row it
 * does not count. Each matrix has an element type of its own: one that is not MHA_F32 is widened a
 * piece at a time for the products of many rows, and multiplied as it is stored for few. A matrix
 * may be NULL: its step is then the identity (input width = output width) and its bias still
 * applies. Each bias may be NULL on its own.
 */
typedef struct mha_matrices {
  size_t struct_size;       /**< set by MHA_INIT */
  int32_t orientation;      /**< mha_orientation, needed as soon as one matrix is given */
  int32_t ownership;        /**< mha_ownership */
  const void *query;        /**< Wq [Eq][H·d] */
  const void *key;          /**< Wk [Ek][G·d] */
  const void *value;        /**< Wv [Ev][G·dv] */
  const void *output;       /**< Wo [H·dv][Eo] */
  int32_t query_element;    /**< mha_element of Wq */
  int32_t key_element;      /**< likewise of Wk */
  int32_t value_element;    /**< likewise of Wv */
  int32_t output_element;   /**< likewise of Wo */
  int64_t query_ld;         /**< leading dimension of Wq, 0 = dense */
  int64_t key_ld;           /**< likewise of Wk */
  int64_t value_ld;         /**< likewise of Wv */
  int64_t output_ld;        /**< likewise of Wo */
  const float *query_bias;  /**< bq [H·d] or NULL */
  const float *key_bias;    /**< bk [G·d] or NULL */
  const float *value_bias;  /**< bv [G·dv] or NULL */
  const float *output_bias; /**< bo [Eo] or NULL */
  const float *query_norm;  /**< weight of the normalisation of Q: [d] or [H·d] as config.norm has
                                 it; NULL = ones. Given only where norm is set */
  const float *key_norm;    /**< the same of K: [d] or [G·d] */
  const float *sinks;       /**< [H] extra logits, as in mha_rules, where a call gives none */
  mha_release_function *release; /**< with MHA_BORROW: called with release_user when the layer needs
                                      the arrays no more, by the thread that gives the last
                                      reference back. Not if creation fails. NULL = nobody asks */
  void *release_user;            /**< passed to release */
} mha_matrices;

/**
 * One layer: config, matrices, biases. Immutable and reference-counted.
 * Thread rule: may be used, retained and destroyed from any number of threads at once.
 */
typedef struct mha_weights mha_weights;

/**
 * Makes a layer from arrays in memory.
 * @param config   sizes; copied, with the derived sizes filled in. Not NULL.
 * @param matrices the numbers; copied or borrowed as `ownership` says. Not NULL.
 * @param weights  receives the layer with one reference; free it with mha_weights_destroy.
 *                 NULL is stored on failure. Not NULL.
 * @param error    receives the outcome, or NULL.
 * Errors: NULL, STRUCT_SIZE, SIZE, HEADS, STRIDE, OVERFLOW, VALUE, WEIGHTS (an absent matrix
 * between different widths), UNSUPPORTED (an element type), MEMORY.
 */
MHA_API MHA_MUST_CHECK mha_status mha_weights_create(const mha_config *config,
                                                     const mha_matrices *matrices,
                                                     mha_weights **weights, mha_error *error);

/**
 * Makes a layer from a safetensors file, from a GGUF file, or from a folder of .npy files, each
 * holding the tensor that it is named after. Names as they are in use, behind the prefix:
 *
 *     PyTorch       in_proj_weight [3·E][E] with in_proj_bias, or q_proj_weight, k_proj_weight,
 *                   v_proj_weight with in_proj_bias; out_proj.weight, out_proj.bias
 *     Hugging Face  {q,k,v}_proj or {query,key,value}, also behind self. or attention., and
 *                   out_proj, o_proj or output.dense, each with .weight and .bias
 *     GPT-2         c_attn [E][3·E] and c_proj, each with .weight and .bias
 *     the article   W_Q, W_K, W_V, W_O, each [in][out], and b_Q, b_K, b_V, b_O
 *     GGUF          attn_q, attn_k, attn_v, or attn_qkv [(H + G)·d + G·dv][E] with rows q, k, v;
 *                   and attn_output, each with .weight and .bias; the prefix is "blk.0." for the
 *                   first layer
 *
 * and in all of them q_norm.weight, k_norm.weight and sinks, which GGUF calls attn_q_norm.weight,
 * attn_k_norm.weight and attn_sinks.weight. The orientation follows from the names. Biases may be
 * absent, matrices may not. A tensor that would change the result in a way that this version does
 * not compute (bias_k, say) is an error that names it.
 *
 * The files are mapped, and float32 numbers are used where they lie: a file must not be changed
 * while the layer lives (replacing it by rename is safe), and if it is cut short, reading the
 * numbers ends the process (SIGBUS): mha_file_open can read them into memory instead. float64,
 * float16, bfloat16, Q8_0, Q4_0, and numbers that lie unaligned, column-major or in the other byte
 * order are converted once, into memory that the layer owns; MHA_KEEP_TYPE leaves matrices as they
 * are. A header of more than 100 MB, 262144 tensors or 65536 metadata entries is refused. So is a
 * file of another kind (PyTorch's .pt, HDF5, .npz, ONNX, ...), with a message that says what it
 * seems to be.
 *
 * GGUF: versions 2 and 3, little-endian. Tensors of types beside F32, F64, F16, BF16, Q8_0 and Q4_0
 * may be in the file as long as the layer has none of them. Its metadata, which mha_file_model
 * shows, fills in what `config` leaves 0: n_heads, n_kv_heads, head_size and value_head_size,
 * unless `config` gives one of the four otherwise; norm_epsilon where there is a norm of Q and K;
 * and, where config.rope is set, rotary_size and rope_base. config.rope itself, the scale, the
 * softcap and windows are the caller's. A file with frequencies of its own (rope_freqs.weight)
 * needs them as tables where config.rope is set, and one that says rope.scaling.type needs tables
 * or a rope_base.
 * @param config n_heads is needed, n_kv_heads where heads are grouped (0 = H), and norm_epsilon
 *               where the file has q_norm.weight, which is applied as it is, unless metadata says
 *               them; the other sizes, left 0, follow from the shapes and must agree with them
 *               where given.
 * @param path   the file or the folder. Not NULL.
 * @param prefix stands before each name as given, its dot included, such as "model.layers.0.
 *               self_attn."; "" = the names stand alone; NULL = find the one layer in the file,
 *               whatever its prefix: several are an error that lists them.
 * @param weights receives the layer, as in mha_weights_create.
 * @param error  receives the outcome, or NULL.
 * Errors: those of mha_weights_create; IO; FORMAT, with the place in the file; UNSUPPORTED for a
 * tensor, named, whose type or meaning is not; WEIGHTS for tensors that are missing, ambiguous or
 * of another shape. A file's header is parsed with memory of the C library.
 */
MHA_API MHA_MUST_CHECK mha_status mha_weights_load(const mha_config *config, const char *path,
                                                   const char *prefix, mha_weights **weights,
                                                   mha_error *error);

/* A file, once for many layers. */

/** Bit of mha_file_options.flags: read the files into memory, do not map them. */
#define MHA_READ_FILE UINT32_C(16)

/** How a file is opened. Zero means: mapped, memory of the C library. */
typedef struct mha_file_options {
  size_t struct_size;             /**< set by MHA_INIT */
  uint32_t flags;                 /**< MHA_READ_FILE or 0 */
  int32_t reserved;               /**< 0 */
  const mha_allocator *allocator; /**< for the file object, and for what is read into memory;
                                       NULL = the C library */
  mha_release_function *release; /**< for mha_file_open_bytes: called with release_user when neither
                                      the file nor a layer of it needs the bytes, by the thread
                                      that ends the last of them. Not if opening fails. NULL =
                                      nobody asks */
  void *release_user;            /**< passed to release */
} mha_file_options;

/**
 * Weights as they lie in a file or a folder: tensors, and the layers that their names make. The
 * files must not be changed until it is destroyed and no layer uses its numbers any more, and its
 * allocator must last as long.
 * Thread rule: immutable; any number of threads may ask it and load from it at once.
 */
typedef struct mha_file mha_file;

/**
 * Opens a safetensors file, a GGUF file or a folder of .npy files, as mha_weights_load describes
 * them, and checks the whole of it. A tensor of a type that is not loaded may be in it.
 * @param path    not NULL.
 * @param options NULL = all defaults.
 * @param file    receives it; give it back with mha_file_destroy. NULL on failure. Not NULL.
 * @param error   receives the outcome, or NULL.
 * Errors: NULL, STRUCT_SIZE, VALUE, IO, FORMAT, UNSUPPORTED, MEMORY.
 */
MHA_API MHA_MUST_CHECK mha_status mha_file_open(const char *path, const mha_file_options *options,
                                                mha_file **file, mha_error *error);

/**
 * The same of the bytes of a safetensors or GGUF file that are in memory already. They are
 * borrowed: they stay and do not change until the file and the layers that use their numbers are
 * gone, of which options->release tells.
 * @param bytes   not NULL; float32 numbers that are not aligned as a float is are converted.
 * @param n_bytes how many.
 * @param options as in mha_file_open, without MHA_READ_FILE.
 * @param file    likewise.
 * @param error   likewise.
 * Errors: those of mha_file_open but IO.
 */
MHA_API MHA_MUST_CHECK mha_status mha_file_open_bytes(const void *bytes, size_t n_bytes,
                                                      const mha_file_options *options,
                                                      mha_file **file, mha_error *error);

/** Gives the file back. Layers that were loaded from it keep what they need. NULL is ignored. */
MHA_API void mha_file_destroy(mha_file *file);

/** The most dimensions that a tensor of a file can have. */
#define MHA_MAX_RANK 8

/** A tensor of a file. What it points to is valid until mha_file_destroy. */
typedef struct mha_tensor_info {
  size_t struct_size;          /**< set by MHA_INIT */
  const char *name;            /**< UTF-8 without control characters */
  const char *type;            /**< as the file spells it, such as "F32", "Q6_K" or "<f4" */
  int32_t is_loaded;           /**< nonzero: of a type that becomes a layer's numbers */
  int32_t is_column_major;     /**< nonzero: the first index runs fastest in `data` */
  int32_t rank;                /**< 0 = a single number; −1 = not known, of a type not loaded */
  int32_t reserved;            /**< 0 */
  int64_t shape[MHA_MAX_RANK]; /**< the first `rank` count */
  const void *data;            /**< the bytes as they lie, in the file's byte order and not aligned;
                                    NULL where they cannot be told */
  size_t bytes;                /**< how many */
} mha_tensor_info;

/** The parts of a layer in a file. Wqkv and bqkv hold the rows or columns of three, one after the
 *  other; a layer has either those or the three. */
typedef enum mha_part {
  MHA_PART_WQ = 0,          /**< Wq */
  MHA_PART_WK = 1,          /**< Wk */
  MHA_PART_WV = 2,          /**< Wv */
  MHA_PART_WQKV = 3,        /**< Wq, Wk and Wv in one */
  MHA_PART_WO = 4,          /**< Wo */
  MHA_PART_BQ = 5,          /**< bq */
  MHA_PART_BK = 6,          /**< bk */
  MHA_PART_BV = 7,          /**< bv */
  MHA_PART_BQKV = 8,        /**< bq, bk and bv in one */
  MHA_PART_BO = 9,          /**< bo */
  MHA_PART_QUERY_NORM = 10, /**< the weight of the normalisation of Q */
  MHA_PART_KEY_NORM = 11,   /**< of K */
  MHA_PART_SINKS = 12       /**< sinks */
} mha_part;

/** How many parts there are. */
#define MHA_N_PARTS 13

/** A layer of a file, as far as names tell. What it points to is valid until mha_file_destroy. Two
 *  layers of one prefix, under the names of two families, cannot be loaded by it. */
typedef struct mha_layer_info {
  size_t struct_size;      /**< set by MHA_INIT */
  const char *prefix;      /**< what stands before its tensors' names, for mha_weights_load_from */
  const char *family;      /**< whose names they are, such as "PyTorch, packed" */
  int32_t orientation;     /**< mha_orientation */
  int32_t is_complete;     /**< nonzero: nothing is missing */
  const char *missing;     /**< what is missing, for people, shortened where it is long; or "" */
  const char *unsupported; /**< the name of a tensor that would change the result in a way that
                                is not computed, or NULL */
  int64_t parts[MHA_N_PARTS]; /**< the tensor that is each mha_part, by its index; −1 = none */
} mha_layer_info;

/** Stores how many tensors the file has, in the order of their names, and how many layers, in the
 *  order of theirs. Either place may be NULL. Errors: NULL (the file). */
MHA_API MHA_MUST_CHECK mha_status mha_file_count(const mha_file *file, int64_t *n_tensors,
                                                 int64_t *n_layers, mha_error *error);

/** Describes tensor `index` in *info, whose struct_size must be set. Errors: NULL, STRUCT_SIZE,
 *  LENGTH (no such tensor). */
MHA_API MHA_MUST_CHECK mha_status mha_file_tensor(const mha_file *file, int64_t index,
                                                  mha_tensor_info *info, mha_error *error);

/** Describes layer `index` in *info, whose struct_size must be set: whatever has a matrix or a bias
 *  of q, k or v under some prefix. Errors: NULL, STRUCT_SIZE, LENGTH (no such layer). */
MHA_API MHA_MUST_CHECK mha_status mha_file_layer(const mha_file *file, int64_t index,
                                                 mha_layer_info *info, mha_error *error);

/** What a file says of the model that its layers are part of: GGUF has such metadata, other files
 *  have none. What it points to is valid until mha_file_destroy. A size of 0 is one that the file
 *  does not say. */
typedef struct mha_model_info {
  size_t struct_size;       /**< set by MHA_INIT */
  const char *architecture; /**< such as "llama"; NULL = the file says none */
  int64_t n_layers;         /**< how many it should have */
  int64_t model_width;      /**< of the rows between layers */
  int64_t n_heads;          /**< H, where it is the same in all layers */
  int64_t n_kv_heads;       /**< G, likewise */
  int64_t head_size;        /**< d */
  int64_t value_head_size;  /**< dv */
  int64_t rotary_size;      /**< elements of a head that turn */
  double rope_base;         /**< of the rotary positions */
  float norm_epsilon;       /**< eps of the model's normalisations */
  int32_t rope; /**< mha_rope: which pairs turn in models of this architecture, by its name;
                     MHA_ROPE_NONE = none, or a name that is not known here. Advice: loading leaves
                     config.rope as it is */
} mha_model_info;

/** Describes the model in *info, whose struct_size must be set. Errors: NULL, STRUCT_SIZE. */
MHA_API MHA_MUST_CHECK mha_status mha_file_model(const mha_file *file, mha_model_info *info,
                                                 mha_error *error);

/**
 * Makes a layer from an open file, as mha_weights_load does it from a path. Numbers that are used
 * where they lie keep the file's bytes, mapped or read, as long as the layer lives.
 * @param config as in mha_weights_load.
 * @param file   not NULL.
 * @param prefix as in mha_weights_load.
 * @param weights receives the layer, as in mha_weights_create.
 * @param error  receives the outcome, or NULL.
 * Errors: those of mha_weights_load but IO and FORMAT.
 */
MHA_API MHA_MUST_CHECK mha_status mha_weights_load_from(const mha_config *config, mha_file *file,
                                                        const char *prefix, mha_weights **weights,
                                                        mha_error *error);

/**
 * Writes a layer's matrices, biases, norms and sinks into a safetensors file that mha_weights_load
 * reads, each matrix in its own type, MHA_F32, MHA_F16 or MHA_BF16, the others as float32:
 * MHA_OUT_IN under Hugging Face's names (q_proj, k_proj, v_proj, o_proj), MHA_IN_OUT under the
 * article's. The file is complete and synced under a temporary name beside `path` before it takes
 * its place: a crash leaves the old file or the new one. A process that is ended in the middle, by
 * a signal say, leaves the temporary file, .mha-*.tmp; the library catches no signals. A limit on
 * the size of files (RLIMIT_FSIZE) is an error and raises no SIGXFSZ. The config (heads, scale,
 * norm_epsilon, positions) is not written.
 * @param weights a layer with all four matrices. Not NULL.
 * @param path    the file; replaced as a whole if there is one, with its permissions. A symbolic
 *                link stays, what it leads to is replaced or made; of several hard links only this
 *                one gets the new file. Refused (IO) are what may not be written, folders, pipes,
 *                devices, and names of open files such as /dev/stdout or /dev/fd/3. Not NULL.
 * @param prefix  stands before each name, UTF-8; NULL or "" = none.
 * @param error   receives the outcome, or NULL.
 * Errors: NULL; UNSUPPORTED if a matrix is absent or of a type with blocks, which safetensors has
 * not; VALUE if the prefix is not UTF-8; OVERFLOW;
 * MEMORY; IO, a full disk included: what was at `path` before is there still, unless all that
 * failed was to make the new name last through a crash of the machine.
 */
MHA_API MHA_MUST_CHECK mha_status mha_weights_save(const mha_weights *weights, const char *path,
                                                   const char *prefix, mha_error *error);

/**
 * Makes a layer like `weights` whose matrices are all of one type. Numbers are converted as
 * mha_element_convert does it, and copied with everything else, so the two are independent, but for
 * rotary tables, which stay borrowed.
 * @param weights   not NULL.
 * @param element   mha_element of the new matrices; one with blocks needs rows of whole blocks.
 * @param allocator for the new layer; NULL = the C library.
 * @param converted receives it with one reference; NULL on failure. Not NULL.
 * @param error     receives the outcome, or NULL.
 * Errors: NULL, VALUE (no mha_element), SIZE (rows that are not whole blocks), OVERFLOW, MEMORY.
 */
MHA_API MHA_MUST_CHECK mha_status mha_weights_convert(const mha_weights *weights, int32_t element,
                                                      const mha_allocator *allocator,
                                                      mha_weights **converted, mha_error *error);

/** Shows the layer's numbers in `matrices`, whose struct_size must be set (MHA_INIT): pointers,
 *  leading dimensions and types as the layer uses them, valid until it is destroyed, not to be
 *  changed; release is NULL there. Errors: NULL, STRUCT_SIZE. */
MHA_API MHA_MUST_CHECK mha_status mha_weights_matrices(const mha_weights *weights,
                                                       mha_matrices *matrices, mha_error *error);

/** Adds a reference and returns `weights`; each one needs its own mha_weights_destroy. */
MHA_API mha_weights *mha_weights_retain(mha_weights *weights);

/** Gives one reference back; the last one frees the layer. NULL is ignored. */
MHA_API void mha_weights_destroy(mha_weights *weights);

/** Copies the layer's config, all sizes derived, into `config`, whose struct_size must be set
 *  (MHA_INIT); `allocator` is NULL there. Errors: NULL, STRUCT_SIZE. */
MHA_API MHA_MUST_CHECK mha_status mha_weights_config(const mha_weights *weights, mha_config *config,
                                                     mha_error *error);

/* ---- Context: scratch and threads ------------------------------------------------------------ */

/** One piece of work, to be called once for every index. It never throws or long-jumps. */
typedef void mha_task(void *argument, int64_t index);

/**
 * A caller's own parallel loop: calls task(argument, i) exactly once for every i in [0, n), on any
 * threads, and returns when all have returned. n is at most the context's n_threads. What a loop
 * leaves undone, the calling thread does afterwards; an index that comes twice or is out of range
 * does no harm. A call after mha_context_destroy does.
 */
typedef void mha_parallel_for(void *user, int64_t n, mha_task *task, void *argument);

/**
 * Who does the products of a context's calls. With MHA_ENGINE_XSMM kernels do, machine code that
 * libxsmm generates for the shapes of a layer: products with matrices that MHA_PACK_WEIGHTS packed,
 * and Q·Kᵀ and P·V, unless a few queries meet many keys. They take rows that are dense, or in
 * mha_attend dense heads one after the other; every other product is as in MHA_ENGINE_BLAS. The
 * promises are the same. It needs a library that was built with libxsmm and a CPU with AVX2
 * (mha_build_info tells), and takes a lower instruction set where the environment's LIBXSMM_TARGET
 * names one (hsw, skx, ...).
 */
typedef enum mha_engine_choice {
  MHA_ENGINE_BLAS = 0, /**< every product of float32 is a CBLAS call: the default */
  MHA_ENGINE_XSMM = 1  /**< kernels where there can be one */
} mha_engine_choice;

/** Bit of mha_context_options.flags: never touch the BLAS's thread count; the context then uses
 *  one thread of its own and the BLAS as many as it likes. */
#define MHA_LEAVE_BLAS_ALONE UINT32_C(1)

/** How a context works. Zero means: threads as the BLAS has them, memory of the C library. */
typedef struct mha_context_options {
  size_t struct_size;             /**< set by MHA_INIT */
  uint32_t flags;                 /**< MHA_LEAVE_BLAS_ALONE or 0 */
  int32_t n_threads;              /**< 0: as many as the BLAS would use (it honours its environment
                                       variables), or this process's CPUs where it knows no threads
                                       or was told no number; 1: the caller alone; n: n, at most
                                       1024 and what the BLAS takes */
  mha_parallel_for *parallel_for; /**< the caller's thread pool; NULL = own threads */
  void *parallel_user;            /**< passed to parallel_for; must outlive the context */
  const mha_allocator *allocator; /**< for the context and its scratch; NULL = the C library */
  int32_t engine;                 /**< mha_engine_choice */
  int32_t reserved;               /**< 0 */
} mha_context_options;

/**
 * Scratch memory and threads; serves any number of layers, one after the other.
 * Thread rule: one caller at a time; a second entry, also from a callback, is MHA_ERROR_BUSY.
 * Two contexts may be used by two threads at once, over the same weights.
 * Its threads are started when a call is first worth them, or by a reserve; they sleep between
 * calls, with all signals blocked, and end with the context, which has to be destroyed before a
 * static library in a plugin is unloaded (the shared library stays in the process once it is
 * loaded). One caller's threads do not serve another context.
 * fork() waits, some milliseconds, until no thread is inside a product. After it a child may go on
 * using a context that was idle; it then runs on one thread, unless the context has a parallel_for.
 * Contexts made in the child have threads again. If another thread was inside a call at that
 * moment, the child's BLAS stays at the one thread it was held at. A signal handler that forks in
 * the middle of a call waits for nobody; its child may do what POSIX allows there, such as exec.
 * OpenBLAS's own handler waits for OpenBLAS's threads even there and may then hang: block such
 * signals during calls, or set OPENBLAS_NUM_THREADS=1 and n_threads, so that it has no threads.
 */
typedef struct mha_context mha_context;

/**
 * Makes a context.
 * @param options NULL = all defaults.
 * @param context receives it; free it with mha_context_destroy. NULL on failure. Not NULL.
 * @param error   receives the outcome, or NULL.
 * Errors: NULL, STRUCT_SIZE, VALUE, MEMORY, UNSUPPORTED (an engine that cannot be had here).
 */
MHA_API MHA_MUST_CHECK mha_status mha_context_create(const mha_context_options *options,
                                                     mha_context **context, mha_error *error);

/** Frees the context and its scratch. It must not be inside a call. NULL is ignored. */
MHA_API void mha_context_destroy(mha_context *context);

/** What a shape is for beside mha_forward or mha_attend. The ways back of mha_attend are those with
 *  as many heads: fewer of them may need more. */
typedef enum mha_backward_use {
  MHA_BACKWARD_NONE = 0,      /**< nothing */
  MHA_BACKWARD_WITH_TAPE = 1, /**< mha_forward with a tape, and mha_backward with it; without
                                   weights mha_attend_backward with log_sum_exp */
  MHA_BACKWARD_ALONE = 2      /**< the same without, which takes more */
} mha_backward_use;

/** The sizes that decide how much scratch a call needs. */
typedef struct mha_shape {
  size_t struct_size;      /**< set by MHA_INIT */
  int32_t packed;          /**< nonzero: batch sequences share query_length and key_length rows */
  int32_t cached;          /**< nonzero: the keys are in a cache, key_length the most tokens that an
                                entry will have (of a ring its capacity is enough); packed too:
                                query_length all new rows together */
  int64_t batch;           /**< B */
  int64_t query_length;    /**< Lq, and rows that go to a cache; packed: all query rows together */
  int64_t key_length;      /**< Lk; packed: all key rows together; 0 = as query_length */
  int64_t n_heads;         /**< H, read only where no weights are given (mha_attend) */
  int64_t value_head_size; /**< dv, likewise */
  int64_t n_kv_heads;      /**< G, likewise; 0 = n_heads */
  int64_t head_size;       /**< d, likewise; 0 = value_head_size */
  int32_t cache_type;      /**< where `cached` is set: mha_element of the cache; in mha_attend of k
                                and v, if only one of them is MHA_F32 that of the other */
  int32_t backward;        /**< mha_backward_use: whether it is for training too */
  int64_t cache_page_tokens; /**< where `cached` is set: page_tokens of the cache, 0 without */
} mha_shape;

/**
 * Scratch that a call of this shape needs: grows with Lq + Lk, never with Lq·Lk.
 * @param context its number of threads counts; it is not entered or changed. Not NULL.
 * @param weights the layer for mha_forward, or NULL for mha_attend.
 * @param shape   Not NULL.
 * @param bytes   receives the answer. Not NULL.
 * @param error   receives the outcome, or NULL.
 * Errors: NULL, STRUCT_SIZE, SIZE, HEADS, VALUE (an element type, a mha_backward_use or tokens that
 * no page has), OVERFLOW,
 * UNSUPPORTED (backward with a cache).
 */
MHA_API MHA_MUST_CHECK mha_status mha_workspace_bytes(const mha_context *context,
                                                      const mha_weights *weights,
                                                      const mha_shape *shape, size_t *bytes,
                                                      mha_error *error);

/**
 * Allocates now what calls up to this shape need; such a call then allocates nothing (the BLAS's
 * own buffers aside), and starts the context's threads. Without it a call grows the scratch and
 * starts threads itself. Scratch never shrinks. With MHA_ENGINE_XSMM it also generates the kernels
 * of the layer or of the head sizes, some milliseconds the first time, into executable memory of
 * the system's that the context keeps to its end, 250 to 700 KiB for a layer; a call without a
 * reserve does that itself.
 * Parameters as in mha_workspace_bytes. Errors: those, BUSY, MEMORY (the scratch stays as it was).
 */
MHA_API MHA_MUST_CHECK mha_status mha_context_reserve(mha_context *context,
                                                      const mha_weights *weights,
                                                      const mha_shape *shape, mha_error *error);

/* ---- Who attends to whom, and how scores are made -------------------------------------------- */

/** Bits of mha_rules.flags, beside MHA_SCALE. @{ */
#define MHA_SOFTCAP UINT32_C(2) /**< softcap counts although it is 0: no softcap in this call */
#define MHA_WINDOW  UINT32_C(4) /**< window_left and window_right count */
/** @} */

/** off[b] of batch entry b: key i + off[b] is query i's own. Serves causal, window and ALiBi. */
typedef enum mha_alignment {
  MHA_ALIGN_TOP_LEFT = 0,     /**< off = 0 */
  MHA_ALIGN_BOTTOM_RIGHT = 1, /**< off = key length − query length of the entry */
  MHA_ALIGN_OFFSET = 2        /**< off given */
} mha_alignment;

/** Which numbers mha_results.weights receives. */
typedef enum mha_stage {
  MHA_STAGE_WEIGHTS = 0, /**< after softmax; 0 where hidden. Rows sum to 1 less the sink's share */
  MHA_STAGE_SCALED = 1, /**< scale·q·k, for every j < key length, hidden ones too; −∞ beyond */
  MHA_STAGE_CAPPED = 2, /**< the same after the softcap */
  MHA_STAGE_FINAL = 3   /**< after bias, ALiBi and masks; −∞ where hidden */
} mha_stage;

/**
 * A boolean mask: a nonzero byte lets query i attend to key j. Extents are 1 (the same for all) or
 * the full size; strides follow from the extents and the strides inside unless given (0 = not
 * given). One of an extent of 1 may be anything. Never expanded in memory. Bytes of keys that
 * something else hides are not looked at.
 */
typedef struct mha_mask {
  const void *data;     /**< [batch][heads][rows][columns] bytes, or NULL = no mask */
  int64_t batch;        /**< 1 or B */
  int64_t heads;        /**< 1 or H */
  int64_t rows;         /**< 1 or Lq */
  int64_t columns;      /**< Lk */
  int64_t batch_stride; /**< elements from one batch entry to the next */
  int64_t head_stride;  /**< from one head to the next */
  int64_t row_stride;   /**< from one row to the next */
  int32_t element;      /**< 0: bytes */
  int32_t reserved;     /**< 0 */
} mha_mask;

/** A number added to each score; −∞ hides its key, even where it is NaN. Otherwise as mha_mask. */
typedef struct mha_bias {
  const void *data;     /**< [batch][heads][rows][columns], or NULL = no bias */
  int64_t batch;        /**< 1 or B */
  int64_t heads;        /**< 1 or H */
  int64_t rows;         /**< 1 or Lq */
  int64_t columns;      /**< Lk */
  int64_t batch_stride; /**< as in mha_mask */
  int64_t head_stride;  /**< as in mha_mask */
  int64_t row_stride;   /**< as in mha_mask */
  int32_t element;      /**< mha_element of data */
  int32_t reserved;     /**< 0 */
} mha_bias;

/**
 * The rules of step 3. A score is made in this order:
 *
 *     s = scale·(q·k) → c·tanh(s/c) → + bias, − slope_h·|i + off[b] − j| → hidden keys leave
 *       → a sink joins the denominator → softmax
 *
 * Key j is visible to query i of entry b when all that are given hold: i < query_lengths[b],
 * j < key_lengths[b], causal, window, mask; and when its final score is not −∞. A query that sees
 * no key gets the attention result 0. Hidden keys and values have no influence at all, not even if
 * they hold NaN, and rows beyond a length need not be readable. Intermediate results must fit
 * float32: scale·q·k, and the sum of exp(s − max)·|v| over the visible keys.
 *
 * Dropout: with probability p a weight is multiplied by 0, otherwise by 1/(1 − p), after the
 * softmax and before P·V; weights that are asked for are those before. Weight (b, h, i, j) is kept
 * when a random word of 32 bits is at least p·2³². It is word e mod 4 of Philox4x32-10 ("Parallel
 * Random Numbers: As Easy as 1, 2, 3", 2011) with dropout_seed as key and with the counter (e/4,
 * dropout_call), each as two words, the low one first, and e = ((b·H + h)·Lq + i)·Lk + j, with Lk
 * as masks have it; packed, i and j count within their sequence b, and Lq and Lk are all rows. So
 * the same numbers drop the same weights on any machine, by any number of threads, and backward as
 * forward. A layer needs a seed of its own.
 */
typedef struct mha_rules {
  size_t struct_size;     /**< set by MHA_INIT */
  uint32_t flags;         /**< MHA_SCALE | MHA_SOFTCAP | MHA_WINDOW, as they apply */
  int32_t causal;         /**< nonzero: j ≤ i + off[b] */
  int32_t alignment;      /**< mha_alignment */
  float scale;            /**< with MHA_SCALE: overrides the layer's; finite */
  float softcap;          /**< if not 0, or with MHA_SOFTCAP: overrides the layer's; ≥ 0 */
  float dropout;          /**< p of the dropout, see below; 0 ≤ p < 1, 0 = none */
  int64_t offset;         /**< off[b] of every entry under MHA_ALIGN_OFFSET */
  const int64_t *offsets; /**< [B], off[b] each under MHA_ALIGN_OFFSET; NULL = offset */
  int64_t window_left;    /**< with MHA_WINDOW: j ≥ i + off[b] − window_left; −1 = open */
  int64_t window_right;   /**< with MHA_WINDOW: j ≤ i + off[b] + window_right; −1 = open */
  const int64_t *query_lengths; /**< [B], plain counts 0..Lq; NULL = Lq each. Rows beyond are not
                                     read and count as seeing no key */
  const int64_t *key_lengths;   /**< [B], plain counts 0..Lk; NULL = Lk each */
  const int64_t *query_starts;  /**< [B+1] packed input: entry b is rows [starts[b], starts[b+1])
                                     of one long sequence (cu_seqlens); begins with 0, never
                                     decreases, ends within the rows given; rows behind the last
                                     are written like queries that see no key. NULL = not packed.
                                     Excludes lengths, mask and bias, and in the results weights and
                                     average. With a cache see mha_forward */
  const int64_t *key_starts;    /**< [B+1], the same for keys; NULL with query_starts given and no
                                     key of its own = query_starts */
  mha_mask attend;              /**< boolean mask, nonzero = attend */
  mha_bias bias;                /**< additive mask or position bias */
  const float *alibi_slopes;    /**< [H], finite; NULL = none ("Train Short, Test Long", 2022) */
  const float *sinks;           /**< [H] extra logits without a value; −∞ = none; NULL = none */
  uint64_t dropout_seed;        /**< of the random numbers, where dropout is not 0 */
  uint64_t dropout_call;        /**< number of the call, such as the training step: another one
                                     drops other weights */
} mha_rules;

/** What step 3 is asked for beside its output. Asking changes no bit of the output. */
typedef struct mha_results {
  size_t struct_size; /**< set by MHA_INIT */
  int32_t stage;      /**< mha_stage of `weights` */
  int32_t reserved;   /**< 0 */
  float *weights;     /**< [B][H][Lq][Lk] dense, receives `stage`, or NULL */
  float *average; /**< [B][Lq][Lk] dense, mean over heads of the weights after softmax, or NULL */
  float *log_sum_exp; /**< [B][H][Lq] dense ([H][rows] if packed), natural logarithm of the sum of
                           exp over visible keys, sink not included; −∞ for a query that sees none;
                           or NULL */
} mha_results;

/* ---- Key/value cache --------------------------------------------------------------------------
 */

/** What mha_forward does with mha_forward_args.cache. */
typedef enum mha_cache_mode {
  MHA_CACHE_APPEND_ATTEND = 0, /**< append the rows of key and value, then attend to the entry */
  MHA_CACHE_APPEND = 1, /**< append only: no query is projected, nothing but the cache is written;
                             output may be NULL */
  MHA_CACHE_ATTEND = 2 /**< attend only, also to another layer's cache of the same G, d, dv; key and
                            value must be NULL, and the alignment counts */
} mha_cache_mode;

/**
 * Sizes of a cache. With `weights`, n_entries and capacity are enough, and a window for a ring.
 *
 * Without pages every entry has the memory of `capacity` tokens from the beginning. With pages all
 * entries share n_pages pages of page_tokens tokens: an entry takes one when a token needs it, and
 * mha_cache_truncate and mha_cache_reset give it back. Entries that mha_cache_copy_entry has made
 * equal share pages until one of them writes: it then gets a copy of the page first. So sequences
 * with a common beginning keep it once.
 */
typedef struct mha_cache_options {
  size_t struct_size;      /**< set by MHA_INIT */
  int64_t n_entries;       /**< sequences that it holds, at least 1 */
  int64_t capacity;        /**< tokens per entry, at least 1; with pages the most that an entry may
                                have, 0 = as many as all pages hold. Each page of it costs every
                                entry 4 bytes, also one that the pool cannot fill */
  int64_t n_kv_heads;      /**< G, at least 1; with weights 0 = the layer's */
  int64_t head_size;       /**< d, at least 1; with weights 0 = the layer's */
  int64_t value_head_size; /**< dv; 0 = d, with weights the layer's */
  int64_t
      window; /**< 0: all tokens are kept. Otherwise a ring for layers with a window, window_left
                   + 1: old tokens make room for new ones, the memory stays the same however long
                   the sequence, which ends at 2^62 tokens. A call may bring capacity − window −
                   rollback + 1 tokens */
  int64_t rollback; /**< ring only: how far a truncation may go back behind the longest length */
  const mha_weights *weights; /**< the layer that it is for: sizes left 0 are the layer's, others
                                   must agree with it. Not kept. NULL = all sizes are given */
  const mha_allocator *allocator; /**< NULL = the C library */
  int32_t type; /**< mha_element of keys and values: MHA_F32, MHA_F16, MHA_BF16 or MHA_Q8_0, which
                     needs head sizes that are multiples of 32 */
  int32_t reserved;    /**< 0 */
  int64_t page_tokens; /**< tokens of a page, a power of two from 16 on; 0 = no pages. Small pages
                            waste little at the end of a sequence and make long inputs somewhat
                            slower (bench/README.md) */
  int64_t n_pages;     /**< with pages: how many there are, at least 1; otherwise 0. Where several
                            entries write to a page that they share in one call, each takes a copy,
                            and the page is free only after it: a call may want more pages than its
                            entries then have */
} mha_cache_options;

/**
 * Projected keys and values of past tokens, normalised and rotated: [n_entries][capacity][G·d] and
 * [n_entries][capacity][G·dv], with a length per entry. A ring keeps token t in row t mod capacity,
 * and its length counts all tokens ever seen. With pages the memory is [n_pages][page_tokens]
 * instead (mha_cache_row says where a token lies). Each row is rounded to the cache's type once,
 * when it is appended, as mha_element_convert does it; what is attended to are the rounded numbers,
 * in the call that brings them too. Thread rule: any number of threads read it (attend only,
 * length, row, page count, save), or one caller changes it; otherwise MHA_ERROR_BUSY.
 * mha_cache_view may be called at any time but during mha_cache_grow or mha_cache_destroy.
 */
typedef struct mha_cache mha_cache;

/**
 * Makes a cache, all lengths 0. Its memory is not cleared: rows that were not written are never
 * read.
 * @param options not NULL.
 * @param cache   receives it; free it with mha_cache_destroy. NULL on failure. Not NULL.
 * @param error   receives the outcome, or NULL.
 * Errors: NULL, STRUCT_SIZE, SIZE (also one that is not the layer's), VALUE (a rollback without a
 * window, pages without tokens or the other way round, page_tokens that is no power of two from 16
 * on), UNSUPPORTED (an element type), LENGTH (a ring whose capacity holds no window, rollback and
 * token), OVERFLOW, MEMORY.
 */
MHA_API MHA_MUST_CHECK mha_status mha_cache_create(const mha_cache_options *options,
                                                   mha_cache **cache, mha_error *error);

/** Frees the cache. No call may be using it. NULL is ignored. */
MHA_API void mha_cache_destroy(mha_cache *cache);

/** Stores how many tokens `entry` has in *length. Errors: NULL, LENGTH (no such entry), BUSY. */
MHA_API MHA_MUST_CHECK mha_status mha_cache_length(const mha_cache *cache, int64_t entry,
                                                   int64_t *length, mha_error *error);

/**
 * How many pages a call that appends new_lengths[b] tokens to each entry takes, and how many there
 * are. A page that the entry shares with another counts, since writing into it takes a copy.
 * @param cache         not NULL. Without pages *wanted and *n_free are 0.
 * @param batch         B, at least 0; 0 asks for n_free alone.
 * @param cache_entries [B] entries, each once (one that comes twice is not noticed here, only by
 *                      the call itself); NULL = b.
 * @param new_lengths   [B], at least 0; NULL if batch is 0.
 * @param wanted        receives the pages that the call takes: it is not refused for lack of them
 *                      if they are at most *n_free. Or NULL.
 * @param n_free        receives the pages that no entry has. Or NULL.
 * @param error         receives the outcome, or NULL.
 * Errors: NULL, SIZE, LENGTH (no such entry, a length below 0 or more than an entry may have or, in
 * a ring, a call may bring), BUSY.
 */
MHA_API MHA_MUST_CHECK mha_status mha_cache_page_count(const mha_cache *cache, int64_t batch,
                                                       const int64_t *cache_entries,
                                                       const int64_t *new_lengths, int64_t *wanted,
                                                       int64_t *n_free, mha_error *error);

/**
 * Appends rows that are projected, normalised and rotated already.
 * @param cache         not NULL.
 * @param k             [B][n][G][d], not NULL; copied. MHA_F32 or of the cache's type.
 * @param v             [B][n][G][dv], not NULL; copied. Neither overlaps the cache.
 * @param cache_entries [B] entries that receive them, each once; NULL = b.
 * @param new_lengths   [B] rows that count, 0..n; NULL = all.
 * @param error         receives the outcome, or NULL.
 * Errors: NULL, SIZE, STRIDE, OVERFLOW, VALUE, UNSUPPORTED (an element type), LENGTH (no such
 * entry, an entry twice, no room, too few free pages), OVERLAP, BUSY; the cache is then as it was.
 */
MHA_API MHA_MUST_CHECK mha_status mha_cache_append(mha_cache *cache, const mha_tensor *k,
                                                   const mha_tensor *v,
                                                   const int64_t *cache_entries,
                                                   const int64_t *new_lengths, mha_error *error);

/** Forgets all tokens of `entry` from `length` on, such as rejected guesses. `length` is at most
 *  the entry's and, in a ring, at least its longest since the last reset less the rollback, and
 * such that a ring which was grown or loaded holds all of the window before it. Pages without a
 * token are given back, but for those of a ring that has dropped tokens. Errors: NULL, LENGTH,
 * BUSY. */
MHA_API MHA_MUST_CHECK mha_status mha_cache_truncate(mha_cache *cache, int64_t entry,
                                                     int64_t length, mha_error *error);

/** Forgets all tokens of `entry` and gives its pages back. Errors: NULL, LENGTH (no such entry),
 *  BUSY. */
MHA_API MHA_MUST_CHECK mha_status mha_cache_reset(mha_cache *cache, int64_t entry,
                                                  mha_error *error);

/** Makes entry `to` equal to entry `from`, as beam search does; only rows in use are copied. With
 *  pages none is: both have the same pages from now on, so it never lacks any.
 *  Errors: NULL, LENGTH (no such entry), BUSY. */
MHA_API MHA_MUST_CHECK mha_status mha_cache_copy_entry(mha_cache *cache, int64_t from, int64_t to,
                                                       mha_error *error);

/**
 * Gives a cache without pages more room: `capacity` tokens for each entry, everything that is there
 * stays. Memory for the old and the new room is taken at once, and views are no longer valid.
 * @param cache    not NULL, without pages (those have their pool).
 * @param capacity at least what the cache has; the same changes nothing.
 * @param error    receives the outcome, or NULL.
 * Errors: NULL, UNSUPPORTED (pages), SIZE (less than it has), OVERFLOW, MEMORY, BUSY; the cache is
 * then as it was.
 */
MHA_API MHA_MUST_CHECK mha_status mha_cache_grow(mha_cache *cache, int64_t capacity,
                                                 mha_error *error);

/**
 * Shows the whole memory of the cache: *k is [n_entries][capacity][G][d], *v [n_entries][capacity]
 * [G][dv]: for mha_attend with key_lengths where it is neither a ring (which has token t in row
 * t mod capacity) nor in pages. With pages *k is [n_pages][page_tokens][G][d], *v likewise. Valid
 * while the cache lives and nobody changes it; rows that were not written hold anything. Their
 * element is the cache's type. Errors: NULL.
 */
MHA_API MHA_MUST_CHECK mha_status mha_cache_view(const mha_cache *cache, mha_tensor *k,
                                                 mha_tensor *v, mha_error *error);

/** Stores in *row where token `token` of `entry` lies: its row in mha_cache_view's arrays, counted
 *  over all entries or pages, so page *row / page_tokens, or entry *row / capacity. Valid like the
 *  view. Errors: NULL, LENGTH (no such entry, or a token that it does not hold), BUSY. */
MHA_API MHA_MUST_CHECK mha_status mha_cache_row(const mha_cache *cache, int64_t entry,
                                                int64_t token, int64_t *row, mha_error *error);

/**
 * Writes one entry to a safetensors file: tensors `k` [n][G][d] and `v` [n][G][dv] of the tokens
 * that it holds (in a ring the last ones), as F32, F16 or BF16, or for MHA_Q8_0 as U8 [n][G][bytes
 * of a head's row]; and as metadata libmha.cache = "1", type (F32, F16, BF16, Q8_0), length,
 * n_kv_heads, head_size, value_head_size. The path
 * holds the whole new file or what was there before, as with mha_weights_save. The cache counts as
 * read.
 * @param cache not NULL.
 * @param entry an entry of it, which may be empty.
 * @param path  not NULL.
 * @param error receives the outcome, or NULL.
 * Errors: NULL, LENGTH (no such entry), OVERFLOW, MEMORY, IO, BUSY.
 */
MHA_API MHA_MUST_CHECK mha_status mha_cache_save(const mha_cache *cache, int64_t entry,
                                                 const char *path, mha_error *error);

/**
 * Makes an entry what a file of mha_cache_save holds; what it had before is forgotten. The cache
 * may have another capacity, other pages or a ring: a ring takes the last tokens that it has room
 * for. Numbers of the cache's type are taken as they are, F32 is rounded as by mha_cache_append.
 * @param path  a file of mha_cache_save, not NULL. It need not be trusted.
 * @param cache of the same G, d and dv; not NULL.
 * @param entry an entry of it.
 * @param error receives the outcome, or NULL.
 * Errors: NULL, LENGTH (no such entry, more tokens than the capacity or in a ring 2^62, fewer pages
 * free or had by this entry alone than it will have, tokens missing at the beginning that the cache
 * must have), SIZE (another G, d or dv), UNSUPPORTED
 * (another type), IO, FORMAT, OVERFLOW, MEMORY, BUSY; the cache is then as it was.
 */
MHA_API MHA_MUST_CHECK mha_status mha_cache_load(const char *path, mha_cache *cache, int64_t entry,
                                                 mha_error *error);

/* ---- The layer ------------------------------------------------------------------------------- */

/**
 * The article's call: self attention of a dense batch, every token sees every token.
 * @param context scratch; not NULL.
 * @param weights the layer, with Eq = Ek = Ev; not NULL.
 * @param x       [batch][length][Eq], dense; may be NULL if batch or length is 0.
 * @param batch   B, at least 0; 0 succeeds and writes nothing.
 * @param length  L, likewise.
 * @param output  [batch][length][Eo], dense, overwritten; must not overlap x or the weights.
 * @param error   receives the outcome, or NULL.
 * Errors: NULL, SIZE, OVERFLOW, LENGTH (more tokens than the layer's tables have positions),
 * OVERLAP, BUSY, MEMORY.
 */
MHA_API MHA_MUST_CHECK mha_status mha_self_attention(mha_context *context,
                                                     const mha_weights *weights, const float *x,
                                                     int64_t batch, int64_t length, float *output,
                                                     mha_error *error);

/** What a call of mha_forward keeps for mha_backward, see mha_tape_create. */
typedef struct mha_tape mha_tape;

/**
 * Bit of flags in mha_forward_args and mha_attend_args: a size of 0 is meant. A batch, a length or
 * a number of sequences of 0 is legal, and mostly one that was forgotten: without the bit it is
 * MHA_ERROR_SIZE as soon as an array is given that it is the size of and that the call would use.
 * Where all of these are NULL it is a success without the bit too.
 */
#define MHA_ALLOW_EMPTY UINT32_C(32)

/**
 * Everything that a layer call can be given. Strides count elements, 0 = dense, so that
 * [L][B][E] fits too: batch stride E, row stride B·E. With packed input (rules->query_starts)
 * batch is the number of sequences, query_length and key_length are all rows together, and the
 * batch strides are not used. A row stride of one row may be anything; a batch stride that is 0 is
 * the row stride, if that is at least the width, times the rows.
 */
typedef struct mha_forward_args {
  size_t struct_size;          /**< set by MHA_INIT */
  uint32_t flags;              /**< MHA_ALLOW_EMPTY or 0 */
  int32_t accumulate;          /**< nonzero: output += result (a residual); 0: output = result */
  int32_t cache_mode;          /**< mha_cache_mode; 0 without a cache */
  int32_t reserved;            /**< 0 */
  int64_t batch;               /**< B; 0 writes nothing, see MHA_ALLOW_EMPTY. Packed rows that are
                                    given then lie behind the last sequence */
  int64_t query_length;        /**< Lq; 0 likewise, but new rows still go to a cache */
  int64_t key_length;          /**< Lk; where key is NULL, 0 or Lq. 0 with a key: no query sees one,
                                    see MHA_ALLOW_EMPTY */
  const float *query;          /**< [B][Lq][Eq] */
  const float *key;            /**< [B][Lk][Ek]; NULL = query (needs Ek = Eq) */
  const float *value;          /**< [B][Lk][Ev]; NULL = key (needs Ev = Ek); error without key */
  float *output;               /**< [B][Lq][Eo]; overlaps no input, no weights, no other output */
  int64_t query_batch_stride;  /**< of query, from one batch entry to the next */
  int64_t query_row_stride;    /**< of query, from one row to the next */
  int64_t key_batch_stride;    /**< of key, from one batch entry to the next */
  int64_t key_row_stride;      /**< of key, from one row to the next */
  int64_t value_batch_stride;  /**< of value, from one batch entry to the next */
  int64_t value_row_stride;    /**< of value, from one row to the next */
  int64_t output_batch_stride; /**< of output, from one batch entry to the next */
  int64_t output_row_stride;   /**< of output, from one row to the next */
  const mha_rules *rules;      /**< who attends to whom; NULL = everyone to everyone */
  const mha_results *results;  /**< what is asked for beside the output; NULL = nothing */
  mha_cache *cache;            /**< where keys and values are kept, or NULL */
  const int64_t *cache_entries; /**< [B] entry of the cache that each batch entry uses; NULL = b */
  const int64_t *new_lengths;   /**< [B] with a cache: how many of the rows are tokens, the others
                                     padding that is not read, 0..rows; NULL = all */
  const int64_t *expected_lengths; /**< [B] with a cache: the length that each batch entry's cache
                                        entry must have before the call, so that a sequence that
                                        starts again without mha_cache_reset is MHA_ERROR_LENGTH;
                                        NULL = not checked */
  int64_t query_position; /**< added to the rotary position of every query, counted or given,
                               and of its key where key is NULL */
  int64_t key_position;   /**< added to the rotary position of every row of key, counted or
                               given */
  const int64_t *query_positions; /**< [B][Lq] rotary positions instead of the counted ones, or
                                       NULL; packed: [rows]. query_position is added to them too */
  const int64_t *key_positions;   /**< [B][Lk] of the rows of key, likewise */
  mha_tape *tape; /**< receives what mha_backward would have to compute again; NULL = nothing is
                       kept. Not with a cache. Changes no bit of any result */
} mha_forward_args;

/**
 * One layer call, self or cross attention.
 *
 * With a cache the rows of key and value are appended to it, projected and rounded to its type, and
 * the queries attend to all that the entry then holds. Lk, in masks and results, is the largest
 * length of the batch's entries after the call; columns are absolute key indices, and those that a
 * ring has dropped show −∞, or weight 0. off[b] is the entry's length before the call, whatever
 * alignment is given, so query i sits at its own token. Nothing else changes: tokens that come
 * together see each other unless causal is set. Over a ring every call that attends needs
 * MHA_WINDOW with a window_left below the ring's window; otherwise it is MHA_ERROR_VALUE, from the
 * first token on. Query rows behind new_lengths[b] count as behind query_lengths, also where the
 * key is not the query: min(Lq, new_lengths[b]) queries are computed. Without new_lengths all are,
 * more than the rows of key or fewer. query_lengths and key_lengths are refused. On failure the
 * lengths, and with pages who has which, are as they were. With MHA_CACHE_ATTEND off[b] is what the
 * alignment says: a layer that shares the keys of the same tokens asks for MHA_ALIGN_BOTTOM_RIGHT.
 *
 * Too few free pages are MHA_ERROR_LENGTH that says how many are wanted and free, before anything
 * is written: see mha_cache_page_count.
 *
 * Packed input with a cache is one call for many sequences in different states, such as some that
 * go on by one token and one that begins with hundreds: the rows of sequence b, from
 * query_starts[b] to query_starts[b + 1], are appended to entry cache_entries[b], and no row is
 * padding. Where key is given, key_starts says which of its rows are appended. The rules on packed
 * input hold, so new_lengths, masks, bias and weights asked for are refused. With MHA_CACHE_ATTEND
 * there are query_starts alone; with MHA_CACHE_APPEND and a key they may be left out.
 *
 * Rotary positions: query i has position off[b] + i with a cache, otherwise i, plus query_position;
 * its key, where key is NULL, the same. Rows of key count likewise with key_position. In packed
 * input i counts from the start of its sequence. Positions do not move masks. Overlap is judged by
 * address ranges, first element to last. Errors: any class but IO and FORMAT; nothing is written
 * then.
 * @param context scratch; not NULL.
 * @param weights the layer; not NULL.
 * @param args    not NULL; not kept.
 * @param error   receives the outcome, or NULL.
 */
MHA_API MHA_MUST_CHECK mha_status mha_forward(mha_context *context, const mha_weights *weights,
                                              const mha_forward_args *args, mha_error *error);

/* ---- The steps apart ------------------------------------------------------------------------- */

/**
 * Steps 1 and 2 of mha_forward's call alone, for those who do step 3 themselves or elsewhere: Q, K
 * and V as they are projected, normalised and rotated. With mha_attend on them as [B][L][heads]
 * [size] and mha_project_output after it, that is mha_forward.
 * @param context scratch; not NULL.
 * @param weights the layer; not NULL.
 * @param args    the call, without a cache; not NULL. Of the rules only lengths, starts and, for
 *                the positions of queries, the alignment matter; output, results and tape are not
 *                looked at.
 * @param q       receives Q [B][Lq][H·d], dense; NULL = not wanted.
 * @param k       receives K [B][Lk][G·d], dense; NULL where v is.
 * @param v       receives V [B][Lk][G·dv], dense; NULL where k is.
 * @param error   receives the outcome, or NULL.
 * Packed, B is 1 and the rows are all together. Rows beyond a length or behind the last sequence
 * are left as they are. No array overlaps another one or an input.
 * Errors: those of mha_forward; UNSUPPORTED: a cache. Nothing is written then.
 */
MHA_API MHA_MUST_CHECK mha_status mha_project_inputs(mha_context *context,
                                                     const mha_weights *weights,
                                                     const mha_forward_args *args, float *q,
                                                     float *k, float *v, mha_error *error);

/**
 * Step 5 of mha_forward's call alone: output = concat·Wo + bo, added to what is there where
 * args->accumulate says so. Rows that are not computed count as zeros, as in mha_forward.
 * @param context scratch; not NULL.
 * @param weights the layer; not NULL.
 * @param args    the call, without a cache; not NULL. Its inputs are checked, not read; results and
 *                tape are not looked at.
 * @param concat  [B][Lq][H·dv], dense; not NULL where there are rows. Overlaps no output.
 * @param error   receives the outcome, or NULL.
 * Errors: as mha_project_inputs.
 */
MHA_API MHA_MUST_CHECK mha_status mha_project_output(mha_context *context,
                                                     const mha_weights *weights,
                                                     const mha_forward_args *args,
                                                     const float *concat, mha_error *error);

/* ---- The core alone -------------------------------------------------------------------------- */

/** Where mha_attend writes and what it obeys. */
typedef struct mha_attend_args {
  size_t struct_size;          /**< set by MHA_INIT */
  uint32_t flags;              /**< MHA_ALLOW_EMPTY or 0 */
  int32_t reserved;            /**< 0 */
  int64_t n_sequences;         /**< sequences of packed input; otherwise 0 */
  float *output;               /**< [B][Lq][H][dv]; overlaps nothing else */
  int64_t output_batch_stride; /**< from one batch entry to the next; all three 0 = dense, and
                                    one counts only where its extent exceeds 1 */
  int64_t output_row_stride;   /**< from one row to the next */
  int64_t output_head_stride;  /**< from one head to the next */
  const mha_rules *rules;      /**< NULL = everyone attends to everyone, scale 1/√d */
  const mha_results *results;  /**< what is asked for beside the output; NULL = nothing */
} mha_attend_args;

/**
 * Step 3 alone, for those who project themselves: softmax(scale·q·kᵀ)·v per head.
 * @param context scratch; not NULL.
 * @param q [B][Lq][H][d], not NULL.
 * @param k [B][Lk][G][d], not NULL. As any mha_element but MHA_Q4_0, like v, as mha_cache_view
 *          shows them; q is MHA_F32.
 * @param v [B][Lk][G][dv], not NULL.
 * @param args  not NULL; not kept.
 * @param error receives the outcome, or NULL.
 * Errors: any class but WEIGHTS, IO and FORMAT; nothing is written then.
 */
MHA_API MHA_MUST_CHECK mha_status mha_attend(mha_context *context, const mha_tensor *q,
                                             const mha_tensor *k, const mha_tensor *v,
                                             const mha_attend_args *args, mha_error *error);

/** Parts of one attention, each over keys of its own, and where the whole goes. */
typedef struct mha_merge_args {
  size_t struct_size;        /**< set by MHA_INIT */
  uint32_t flags;            /**< MHA_ALLOW_EMPTY or 0 */
  int32_t reserved;          /**< 0 */
  int64_t n_parts;           /**< at least 1 */
  const mha_tensor *outputs; /**< [n_parts], each [B][Lq][H][dv]: the results of the parts,
                                  without sinks */
  const float *const
      *log_sum_exps;           /**< [n_parts], each [B][H][Lq] dense, as mha_results has them */
  const float *sinks;          /**< [H] of the whole, as in mha_rules; NULL = none */
  float *output;               /**< [B][Lq][H][dv] */
  int64_t output_batch_stride; /**< as in mha_attend_args */
  int64_t output_row_stride;   /**< likewise */
  int64_t output_head_stride;  /**< likewise */
  float *log_sum_exp;          /**< [B][H][Lq] of the whole, without sinks, or NULL */
} mha_merge_args;

/**
 * Makes one attention of several over parts of its keys, for those who split the keys themselves:
 *
 *     lse = ln Σ_u exp(lse_u),   output = Σ_u exp(lse_u − lse)·output_u
 *
 * with a sink's share taken from the output at the end. A part in which a query sees no key (lse_u
 * = −∞) adds nothing, whatever its output holds; one whose log-sum-exp is NaN or +∞, or whose
 * output is NaN, makes the row NaN, however small its weight. The parts are added in their order.
 * output may be one of the outputs, by address and strides, and log_sum_exp one of the
 * log_sum_exps; otherwise they overlap nothing.
 * Thread rule: touches its arguments alone, on the calling thread.
 * Errors: NULL, STRUCT_SIZE, SIZE (parts of different shapes, or one that was forgotten), STRIDE,
 * OVERFLOW, VALUE, OVERLAP, UNSUPPORTED; nothing is written then.
 */
MHA_API MHA_MUST_CHECK mha_status mha_merge(const mha_merge_args *args, mha_error *error);

/* ---- Training -------------------------------------------------------------------------------- */

/*
 * The gradients of a loss whose gradient with respect to the output is dy, that is of Σ dy∘output:
 *
 *     dWo = concatᵀ·dy,  dbo = Σ dy,  dO = dy·Woᵀ                      (rows of all entries summed)
 *     dV = Pᵀ·dO,  dP = dO·Vᵀ,  D_i = Σ_c dO_ic·O_ic,  dF = P∘(dP − D)      per head; F: the final
 *     dbias = dF,  dslope_h = −Σ dF_ij·|i + off − j|,  dsink_h = −Σ_i P_sink·D_i             scores
 *     dS = scale·dF∘(1 − (capped/c)²),  dQ = dS·K,  dK = dSᵀ·Q
 *     back through the rotary positions and the normalisations of Q and K
 *     dWq = queryᵀ·dQ,  dbq = Σ dQ,  dquery = dQ·Wqᵀ, likewise of K and V
 *
 * With dropout dV has the weights that were kept and dP is dropped likewise. The probabilities are
 * made again, a tile at a time, from the scores and each row's maximum and sum (after
 * "FlashAttention", 2022), so memory grows with Lq + Lk. What is summed over query heads that share
 * a key head, over entries or over rows is summed in an order that shapes alone decide: the same
 * bits for any number of threads. Asking for fewer gradients changes no bit of the others.
 *
 * A hidden token gets exactly 0, NaN in it reaches nothing, and a query that sees no key passes
 * nothing back. Rows beyond a length or behind the last sequence have gradients of 0, and a call
 * without rows (B = 0 or Lq = 0) has gradients of 0 of all that it has: they overwrite what is
 * there, unless it is added to. A NaN that is seen makes NaN of what it meets. Through boolean
 * masks, lengths, the scale, rotary tables and results asked for nothing passes.
 */

/**
 * Makes an empty tape: it holds Q, K and V as projected and prepared, concat and the statistics of
 * each softmax of one call. mha_forward fills it, growing it where that is needed, and a later call
 * may fill it again. A call that is refused, or finds its context busy, leaves the tape as it was;
 * one that fails later, for want of memory, leaves it empty.
 * Thread rule: one call fills it, or any number of mha_backward read it.
 * @param allocator NULL = the C library.
 * @param tape      receives it; free it with mha_tape_destroy. NULL on failure. Not NULL.
 * @param error     receives the outcome, or NULL.
 * Errors: NULL, MEMORY.
 */
MHA_API MHA_MUST_CHECK mha_status mha_tape_create(const mha_allocator *allocator, mha_tape **tape,
                                                  mha_error *error);

/** Frees the tape. No call may be using it. NULL is ignored. */
MHA_API void mha_tape_destroy(mha_tape *tape);

/**
 * The memory that a tape takes for a call of this shape: grows with Lq + Lk.
 * @param weights the layer; not NULL.
 * @param shape   batch, query_length, key_length and packed count, as in mha_context_reserve;
 *                the others are checked alone. Not NULL.
 * @param bytes   receives the answer. Not NULL.
 * @param error   receives the outcome, or NULL.
 * Errors: NULL, STRUCT_SIZE, SIZE, VALUE, OVERFLOW, UNSUPPORTED (a cache).
 */
MHA_API MHA_MUST_CHECK mha_status mha_tape_bytes(const mha_weights *weights, const mha_shape *shape,
                                                 size_t *bytes, mha_error *error);

/**
 * Allocates now what calls up to this shape need; with mha_context_reserve for the same shape and
 * MHA_BACKWARD_WITH_TAPE neither mha_forward nor mha_backward then allocates anything. What the
 * tape held is gone. Parameters and errors as in mha_tape_bytes, and MEMORY (the tape stays as it
 * was).
 */
MHA_API MHA_MUST_CHECK mha_status mha_tape_reserve(mha_tape *tape, const mha_weights *weights,
                                                   const mha_shape *shape, mha_error *error);

/**
 * What comes from above, and the gradients that are wanted: each NULL = not wanted. A gradient lies
 * as the thing itself: strides, orientation and leading dimension are the same (of a matrix those
 * that mha_weights_create was given, also where it copied; of a layer that was loaded or converted
 * those that mha_weights_matrices shows), its numbers are float32 whatever the type of the thing,
 * and what lies between its rows is not touched. Gradients overlap nothing else that the call reads
 * or writes, and no two elements of one share an address. Two gradients may lie within one block
 * where their strides, each a multiple of the next, keep them apart: those of matrices as columns
 * of it, those of inputs as parts of its rows, as in [B][L][3][H][d].
 */
typedef struct mha_backward_args {
  size_t struct_size;      /**< set by MHA_INIT */
  uint32_t flags;          /**< 0 */
  int32_t accumulate;      /**< nonzero: gradients are added to what is there (micro-batches);
                                0: they overwrite it */
  const float *dy;         /**< [B][Lq][Eo]; not NULL where there are rows. Rows beyond
                                query_lengths or behind the last sequence are read for d_bo
                                alone: they are bo */
  int64_t dy_batch_stride; /**< of dy, from one batch entry to the next; 0 = dense, as in
                                mha_forward_args */
  int64_t dy_row_stride;   /**< of dy, from one row to the next, likewise */
  float *d_query;          /**< as args.query. Where that is also key or value, because those are
                                NULL, it is the sum over all that it serves as */
  float *d_key;            /**< as args.key, value's share included where that is NULL; NULL where
                                args.key is */
  float *d_value;          /**< as args.value; NULL where that is */
  float *d_wq;             /**< as Wq; NULL where the layer has none, as of all below */
  float *d_wk;             /**< as Wk */
  float *d_wv;             /**< as Wv */
  float *d_wo;             /**< as Wo */
  float *d_bq;             /**< [H·d] */
  float *d_bk;             /**< [G·d] */
  float *d_bv;             /**< [G·dv] */
  float *d_bo;             /**< [Eo] */
  float *d_query_norm;     /**< [d] or [H·d]; also where the layer's is NULL, as ones */
  float *d_key_norm;       /**< [d] or [G·d], likewise */
  float *d_bias;           /**< as rules.bias, over whose extents of 1 it is summed; 0 where the
                                bias is −∞ or its key hidden. It costs the scores once more */
  float *d_alibi_slopes;   /**< [H] */
  float *d_sinks;          /**< [H], of the layer's sinks or of those of the call */
  const mha_tape *tape;    /**< what mha_forward kept of this very call; NULL = it is computed
                                again. Layer and sizes are checked; inputs, rules and positions
                                have to be the same, and dropout with its numbers */
} mha_backward_args;

/**
 * The way back through one layer call.
 * @param context scratch; not NULL.
 * @param weights the layer of the forward call, its numbers unchanged since; not NULL. Gradients of
 *                inputs pass through matrices of any type.
 * @param args    the arguments of the forward call; not NULL. output, accumulate, results and tape
 *                are not looked at: an output that was added to something (a residual) passes dy on
 *                to that as it is.
 * @param back    not NULL; not kept.
 * @param error   receives the outcome, or NULL.
 * With MHA_ENGINE_XSMM products are as in MHA_ENGINE_BLAS. A trace shows "d_concat" [B][Lq][H·dv],
 * "d_heads" [B][H][Lq][dv], "d_Q" [B][Lq][H·d], "d_K" [B][Lk][G·d], "d_V" [B][Lk][G·dv], of the
 * things as the forward call's trace shows them, and then "d_query", "d_key" and "d_value", with
 * the strides of the inputs; of all these those that are wanted or that something wanted needs.
 * Errors: any class but IO and FORMAT; nothing is written then. UNSUPPORTED: a cache. WEIGHTS: a
 * gradient of something that the layer or the call has not. VALUE: a tape that is empty or was
 * filled by a call of another layer or of other sizes.
 */
MHA_API MHA_MUST_CHECK mha_status mha_backward(mha_context *context, const mha_weights *weights,
                                               const mha_forward_args *args,
                                               const mha_backward_args *back, mha_error *error);

/** What comes from above of step 3 alone, and the gradients that are wanted, as in
 *  mha_backward_args. */
typedef struct mha_attend_backward_args {
  size_t struct_size;       /**< set by MHA_INIT */
  uint32_t flags;           /**< 0 */
  int32_t accumulate;       /**< as in mha_backward_args */
  const float *dy;          /**< [B][Lq][H][dv]; rows beyond query_lengths are not read */
  int64_t dy_batch_stride;  /**< from one batch entry to the next; all three 0 = dense, and one
                                 counts only where its extent exceeds 1 */
  int64_t dy_row_stride;    /**< from one row to the next */
  int64_t dy_head_stride;   /**< from one head to the next */
  const float *log_sum_exp; /**< [B][H][Lq], what the forward call gave as
                                 mha_results.log_sum_exp; args.output must then hold what it wrote.
                                 A weight is exp(score - log_sum_exp), so it is as exact as that
                                 float: where scores are in the hundreds or beyond, leave it out.
                                 NULL = both are computed again, args.output is not looked at */
  float *d_q;               /**< as q */
  float *d_k;               /**< as k, as float32 */
  float *d_v;               /**< as v, as float32 */
  float *d_bias;            /**< as rules.bias, as in mha_backward_args */
  float *d_alibi_slopes;    /**< [H] */
  float *d_sinks;           /**< [H] */
} mha_attend_backward_args;

/**
 * The way back through mha_attend.
 * @param context scratch; not NULL.
 * @param q     as in mha_attend, likewise k and v.
 * @param k     likewise.
 * @param v     likewise.
 * @param args  the arguments of the forward call; not NULL. results is not looked at, nor is output
 *              without log_sum_exp.
 * @param back  not NULL; not kept.
 * @param error receives the outcome, or NULL.
 * Errors: any class but IO and FORMAT; nothing is written then. WEIGHTS: a gradient of something
 * that the call has not.
 */
MHA_API MHA_MUST_CHECK mha_status mha_attend_backward(mha_context *context, const mha_tensor *q,
                                                      const mha_tensor *k, const mha_tensor *v,
                                                      const mha_attend_args *args,
                                                      const mha_attend_backward_args *back,
                                                      mha_error *error);

/* ---- Trace ----------------------------------------------------------------------------------- */

/** One step's data, as it lies: element (i0, i1, …) is data[i0·strides[0] + i1·strides[1] + …]. */
typedef struct mha_trace_step {
  const char *name;   /**< "Q", "K", "V", "weights", "heads", "concat" or "output"; of mha_backward
                           see there */
  const float *data;  /**< valid during the callback only */
  int32_t rank;       /**< 3 or 4 */
  int64_t shape[4];   /**< Q [B][Lq][H·d], K [B][Lk][G·d], V [B][Lk][G·dv], heads [B][H][Lq][dv],
                           concat [B][Lq][H·dv], output [B][Lq][Eo]; B = 1 if packed */
  int64_t strides[4]; /**< in elements */
} mha_trace_step;

/** Receives the steps, on the thread that made the call, in the order of computation. It must
 *  not change the data and must not enter the same context (MHA_ERROR_BUSY). */
typedef void mha_trace_function(void *user, const mha_trace_step *step);

/**
 * Has mha_forward and mha_backward show each step; NULL ends it. The trace changes no bit of any
 * result. Rows beyond a length are not computed: they show 0 in every step before the output.
 * "weights" comes only when the call asks for weights, and shows those. K and V are not shown where
 * they go to a cache, and MHA_CACHE_APPEND shows nothing. Errors: NULL, BUSY.
 */
MHA_API MHA_MUST_CHECK mha_status mha_context_trace(mha_context *context,
                                                    mha_trace_function *function, void *user,
                                                    mha_error *error);

/* ---- About the library ----------------------------------------------------------------------- */

/** Release of the library, such as "0.1.0"; static. */
MHA_API const char *mha_version(void);

/** The same as a number, to be compared with MHA_VERSION_NUMBER. */
MHA_API int32_t mha_version_number(void);

/**
 * Describes this build and machine in lines "key: value": version, blas, blas_threading,
 * blas_threads, blas_core, instruction_set, engines, and xsmm: the instruction set of its kernels
 * or why there are none. Writes at most `bytes` bytes, zero included, and returns the length of the
 * whole text, as snprintf does; `text` may be NULL if `bytes` is 0.
 */
MHA_API size_t mha_build_info(char *text, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
