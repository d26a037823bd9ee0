/**
 * @file mha_mpi.h
 * libmha_mpi: one layer over the processes of an MPI communicator, on top of mha.h. Letters, names,
 * structs and errors are as there.
 *
 * By heads ("Megatron-LM", 2019): process r of n holds heads [r·H/n, (r+1)·H/n), the key heads that
 * serve them, their columns of Wq, Wk, Wv and their rows of Wo. Inputs are the same on all; the
 * output is the sum over the processes. By positions ("Ring Attention with Blockwise Transformers",
 * 2023): each process holds a part of the rows; keys and values travel round in a ring while those
 * at hand are computed, and mha_merge makes one result of the parts. Both together: processes
 * [p·n, (p+1)·n) of the communicator have the same rows and share the heads.
 *
 *     MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
 *     mha_mpi_team *team = NULL;
 *     mha_mpi_weights *weights = NULL;
 *     if (mha_mpi_team_create(MPI_COMM_WORLD, NULL, &team, &error) ||
 *         mha_mpi_weights_load(team, &config, "layer.safetensors", NULL, &weights, &error) ||
 *         mha_mpi_forward(team, context, weights, &args, NULL, &error))
 *       fprintf(stderr, "%s\n", error.message);
 *     mha_mpi_weights_destroy(weights);
 *     mha_mpi_team_destroy(team);
 *     MPI_Finalize();
 *
 * Collective: every function that takes a team, but mha_mpi_team_place, mha_mpi_rows and
 * mha_mpi_team_trace, is to be called by all processes of the team, in the same order, with
 * arguments that say the same; sizes, flags, rules and lengths are compared before anything is
 * sent, numbers (of inputs, matrices and masks) are not. What one process finds wrong, and what one
 * has no memory for, is the same status with the same message on all: none is left waiting, and
 * outputs are as they were (what mha_mpi_forward and mha_mpi_backward say of some excepted). Only a
 * team that is NULL is found by the process itself, since it then has nobody to tell.
 *
 * What a process that died, or that does not make the call, means is MPI's affair: by the
 * communicator's error handler or for ever the others wait or end. A failure that MPI reports on
 * the team's own communicators is MHA_ERROR_COMMUNICATION, on the processes that it is reported to;
 * the team is then of no more use.
 *
 * MPI is called on the calling thread alone: MPI_THREAD_FUNNELED is enough where that is the main
 * thread. A team serves one caller at a time, and the team ends before MPI_Finalize. The team has
 * communicators of its own: the caller's messages never meet its own.
 *
 * Promised: the same bits for the same number of processes, cut in the same way, on one machine
 * with one MPI; the same on all processes that hold a result. Between different numbers of
 * processes results agree within rounding.
 */
#ifndef MHA_MPI_H
#define MHA_MPI_H

#include <mha.h>
#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Marks what the library exports. */
#if defined(MHA_STATIC) || defined(MHA_MPI_STATIC)
#define MHA_MPI_API
#elif defined(_WIN32) && defined(MHA_MPI_BUILDING)
#define MHA_MPI_API __declspec(dllexport)
#elif defined(_WIN32)
#define MHA_MPI_API __declspec(dllimport)
#elif defined(__GNUC__)
#define MHA_MPI_API __attribute__((visibility("default")))
#else
#define MHA_MPI_API
#endif

/* ---- The team -------------------------------------------------------------------------------- */

/** How the processes of a communicator share the work. Zero means: all of them by heads. */
typedef struct mha_mpi_options {
  size_t struct_size;             /**< set by MHA_INIT */
  uint32_t flags;                 /**< 0 */
  int32_t by_heads;               /**< n processes that share the heads of the same rows: it divides
                                       the number of processes; 0 = all. 1 = by positions alone */
  const mha_allocator *allocator; /**< for the team and its scratch; NULL = the C library */
} mha_mpi_options;

/** Processes that work on the same layers, and the scratch for their messages. */
typedef struct mha_mpi_team mha_mpi_team;

/**
 * Makes a team of the processes of a communicator. Collective over it.
 * @param communicator duplicated, not kept.
 * @param options      NULL = all defaults; the same on all.
 * @param team         receives it; free it with mha_mpi_team_destroy. NULL on failure. Not NULL.
 * @param error        receives the outcome, or NULL.
 * Errors: NULL, STRUCT_SIZE, VALUE, SIZE (by_heads does not divide the processes), MEMORY,
 * COMMUNICATION; MPI that is not initialised, or finalised already, is VALUE.
 */
MHA_MPI_API MHA_MUST_CHECK mha_status mha_mpi_team_create(MPI_Comm communicator,
                                                          const mha_mpi_options *options,
                                                          mha_mpi_team **team, mha_error *error);

/** Frees the team: collective, and before MPI_Finalize. Weights may outlive it. NULL is ignored. */
MHA_MPI_API void mha_mpi_team_destroy(mha_mpi_team *team);

/** Where a process stands in its team. */
typedef struct mha_mpi_place {
  size_t struct_size;   /**< set by MHA_INIT */
  int32_t n_processes;  /**< of the team */
  int32_t rank;         /**< this one's number: position·by_heads + head */
  int32_t by_heads;     /**< n processes that share heads */
  int32_t head;         /**< this one's number among them */
  int32_t by_positions; /**< p processes that share rows */
  int32_t position;     /**< this one's number among them */
} mha_mpi_place;

/** Describes this process's place in *place, whose struct_size must be set. Not collective. Errors:
 *  NULL, STRUCT_SIZE. */
MHA_MPI_API MHA_MUST_CHECK mha_status mha_mpi_team_place(const mha_mpi_team *team,
                                                         mha_mpi_place *place, mha_error *error);

/** Which rows each of p processes holds. */
typedef enum mha_mpi_order {
  MHA_MPI_BLOCKS = 0,   /**< process r the r-th block of neighbours; the blocks may be of any
                             lengths, 0 included */
  MHA_MPI_BALANCED = 1, /**< of 2·p blocks, block i being rows [i·L/(2p), (i+1)·L/(2p)), process r
                             holds block r and, behind it, block 2·p − 1 − r: under a causal rule
                             all then have the same work */
} mha_mpi_order;

/** Rows [begin, begin + length) of all. */
typedef struct mha_mpi_range {
  int64_t begin;  /**< the first */
  int64_t length; /**< how many */
} mha_mpi_range;

/**
 * Tells which of `length` rows this process holds, if they are spread by positions: under
 * MHA_MPI_BLOCKS rows [position·length/p, (position+1)·length/p) in ranges[0], under
 * MHA_MPI_BALANCED two blocks. They lie one behind the other in the process's arrays.
 * @param team   not NULL. Not collective.
 * @param length of all processes together, at least 0.
 * @param order  mha_mpi_order.
 * @param ranges receives both; one without rows has length 0. Not NULL.
 * @param error  receives the outcome, or NULL.
 * Errors: NULL, SIZE, VALUE.
 */
MHA_MPI_API MHA_MUST_CHECK mha_status mha_mpi_rows(const mha_mpi_team *team, int64_t length,
                                                   int32_t order, mha_mpi_range ranges[2],
                                                   mha_error *error);

/* ---- A layer's share ------------------------------------------------------------------------- */

/**
 * This process's heads of a layer. Immutable.
 * Thread rule: as mha_weights; creation is collective.
 */
typedef struct mha_mpi_weights mha_mpi_weights;

/**
 * Takes this process's share of a layer whose arrays are in memory. n must divide H, and G or be
 * a multiple of it: a key head then serves several processes, and each of them holds it.
 * @param team     not NULL.
 * @param config   the whole layer's, the same on all. Not NULL.
 * @param matrices the whole layer's. Copied is the share alone; borrowed is all, and `release` is
 *                 called when the share needs it no more. Not NULL.
 * @param weights  receives it; free it with mha_mpi_weights_destroy. NULL on failure. Not NULL.
 * @param error    receives the outcome, or NULL.
 * Errors: those of mha_weights_create; HEADS (heads that n does not divide); SIZE (a share that
 * would cut a block of a stored type); UNSUPPORTED (n above 1 and MHA_NORM_FULL, whose rows go over
 * all heads); COMMUNICATION.
 */
MHA_MPI_API MHA_MUST_CHECK mha_status mha_mpi_weights_create(mha_mpi_team *team,
                                                             const mha_config *config,
                                                             const mha_matrices *matrices,
                                                             mha_mpi_weights **weights,
                                                             mha_error *error);

/**
 * Takes this process's share of a layer in a file, as mha_weights_load does it of the whole. Of a
 * mapped file only the share's numbers are read, also where they are converted to float32, unless
 * they are float64, unaligned, column-major or in the other byte order: such a layer is converted
 * as a whole first. The file may be another one on each process.
 * @param team    not NULL.
 * @param config  as in mha_weights_load, the same on all. Not NULL.
 * @param path    as in mha_weights_load. Not NULL.
 * @param prefix  likewise.
 * @param weights receives it, as in mha_mpi_weights_create.
 * @param error   receives the outcome, or NULL.
 * Errors: those of mha_weights_load and of mha_mpi_weights_create.
 */
MHA_MPI_API MHA_MUST_CHECK mha_status mha_mpi_weights_load(mha_mpi_team *team,
                                                           const mha_config *config,
                                                           const char *path, const char *prefix,
                                                           mha_mpi_weights **weights,
                                                           mha_error *error);

/** Frees the share. Not collective. NULL is ignored. */
MHA_MPI_API void mha_mpi_weights_destroy(mha_mpi_weights *weights);

/**
 * The share as a layer of mha.h, with H/n heads: for the sizes of a cache, which holds this
 * process's key heads, for tapes and for mha_context_reserve. bo is in that of head 0 alone. Valid
 * as long as `weights`; NULL of NULL.
 */
MHA_MPI_API const mha_weights *mha_mpi_weights_layer(const mha_mpi_weights *weights);

/* ---- Calls ----------------------------------------------------------------------------------- */

/** Which rows of the output a process receives, where heads are shared. */
typedef enum mha_mpi_output {
  MHA_MPI_ALL_ROWS = 0, /**< all of them, on every process (MPI_Allreduce) */
  MHA_MPI_OWN_ROWS = 1 /**< of R = B·Lq rows, packed Lq, those of [r·R/n, (r+1)·R/n), for process r
                            of n (MPI_Reduce_scatter): output is [own rows][Eo], with
                            output_row_stride */
} mha_mpi_output;

/** How a call is spread. Zero means: rows in blocks, the whole output. */
typedef struct mha_mpi_spread {
  size_t struct_size; /**< set by MHA_INIT */
  int32_t order;      /**< mha_mpi_order of the rows of queries and of keys, by positions */
  int32_t output;     /**< mha_mpi_output, by heads */
} mha_mpi_spread;

/**
 * mha_forward of a layer that the team shares. Arguments are those of mha_forward on the whole
 * layer, but:
 *
 * By heads: masks, biases, slopes and sinks are those of all H heads, inputs and output all rows.
 * The cache holds this process's key heads (mha_mpi_weights_layer gives its sizes); of the results,
 * weights and log_sum_exp are those of this process's heads, [B][H/n][Lq][Lk] and [B][H/n][Lq], and
 * the average is that over all heads. `accumulate` adds the sum to what is there, once. Dropout is
 * UNSUPPORTED where n is above 1: which weights it drops depends on all H heads.
 *
 * By positions: query_length and key_length are the rows that this process holds, its arrays too.
 * Lengths, offsets, alignment, window, causal rule and slopes count in the rows of all processes,
 * query_position too; a mask or bias has this process's rows of queries and all columns. Packed
 * input, a cache, a tape, dropout, and results beside log_sum_exp (this process's rows) are
 * UNSUPPORTED.
 *
 * A call allocates what it needs beyond an earlier one's: the context's scratch, which it reserves
 * itself, and the team's.
 * @param team    not NULL.
 * @param context this process's; not NULL.
 * @param weights the share; not NULL.
 * @param args    not NULL; not kept.
 * @param spread  NULL = all defaults; the same on all.
 * @param error   receives the outcome, or NULL.
 * Errors: those of mha_forward; VALUE where an argument is not the same on all; LENGTH where a
 * process holds another number of rows than MHA_MPI_BALANCED gives it; COMMUNICATION. On failure
 * output, log_sum_exp and the lengths of caches are as they were; weights and average may have been
 * written by the processes that did not fail. A ring that had to forget the call's tokens may show
 * fewer old ones (mha_cache_truncate).
 */
MHA_MPI_API MHA_MUST_CHECK mha_status mha_mpi_forward(mha_mpi_team *team, mha_context *context,
                                                      const mha_mpi_weights *weights,
                                                      const mha_forward_args *args,
                                                      const mha_mpi_spread *spread,
                                                      mha_error *error);

/**
 * mha_attend by positions alone, for those who project themselves: q, k and v are the rows that
 * this process holds, of the heads that it has. Otherwise as mha_mpi_forward by positions; k and v
 * of other types than float32 travel as float32.
 * Errors: those of mha_attend, and as mha_mpi_forward.
 */
MHA_MPI_API MHA_MUST_CHECK mha_status mha_mpi_attend(mha_mpi_team *team, mha_context *context,
                                                     const mha_tensor *q, const mha_tensor *k,
                                                     const mha_tensor *v,
                                                     const mha_attend_args *args,
                                                     const mha_mpi_spread *spread,
                                                     mha_error *error);

/**
 * mha_backward of a layer that the team shares by heads. Gradients of the inputs, of bo, of norm
 * weights and of a bias that all heads share are sums over the processes, and the whole on each.
 * Gradients of matrices and of the other biases lie as the whole thing, as mha_weights_create was
 * given it, and each process writes the columns or rows of its heads, elements of slopes and sinks
 * likewise; of a layer that was loaded, they lie as mha_weights_matrices of the share shows it. dy
 * is the whole on each process.
 * @param team    not NULL; by positions is UNSUPPORTED.
 * @param context this process's; not NULL.
 * @param weights the share; not NULL.
 * @param args    those of the forward call; not NULL.
 * @param back    not NULL; not kept. The same gradients are wanted on all. A tape is this
 *                process's own.
 * @param error   receives the outcome, or NULL.
 * Memory and who is busy are found before anything is written. Where one process alone has an
 * argument that mha_backward refuses, such as a stride, the others may have written gradients of
 * matrices and of what else their own heads have.
 * Errors: those of mha_backward, and as mha_mpi_forward; UNSUPPORTED where n is above 1 and Wq, Wk
 * or Wv absent.
 */
MHA_MPI_API MHA_MUST_CHECK mha_status mha_mpi_backward(mha_mpi_team *team, mha_context *context,
                                                       const mha_mpi_weights *weights,
                                                       const mha_forward_args *args,
                                                       const mha_backward_args *back,
                                                       mha_error *error);

/* ---- Where the time goes --------------------------------------------------------------------- */

/** What a process does for a while. */
typedef enum mha_mpi_work {
  MHA_MPI_COMPUTE = 0, /**< a layer call, a projection, or queries against a block of keys */
  MHA_MPI_SUM = 1,     /**< the sum over processes, waiting for them included */
  MHA_MPI_TRAVEL = 2,  /**< a block of keys and values on its way, from the moment it is asked for
                            until it is there: other work goes on meanwhile */
  MHA_MPI_WAIT = 3,    /**< for such a block, when nothing is left to do */
  MHA_MPI_AGREE = 4    /**< comparing arguments and statuses, waiting included */
} mha_mpi_work;

/** One such while. */
typedef struct mha_mpi_event {
  int32_t work;  /**< mha_mpi_work */
  int32_t step;  /**< by positions: how many blocks have come before */
  double begin;  /**< MPI_Wtime, seconds */
  double end;    /**< likewise */
  int64_t bytes; /**< that this process receives, or sums up */
} mha_mpi_event;

/** Receives the events of a call, in the order of their ends, on the calling thread. */
typedef void mha_mpi_trace_function(void *user, const mha_mpi_event *event);

/** Has calls tell what they do; NULL ends it. Not collective, and it changes no bit. Errors: NULL
 *  (the team). */
MHA_MPI_API MHA_MUST_CHECK mha_status mha_mpi_team_trace(mha_mpi_team *team,
                                                         mha_mpi_trace_function *function,
                                                         void *user, mha_error *error);

#ifdef __cplusplus
}
#endif

#endif
