//! Independent tasks on the threads of rayon's pool (`RAYON_NUM_THREADS`).

use rayon::prelude::*;

/// Runs `op` on every task, in any order. With one thread, or one task, the calling thread does it itself: handing work to a
/// pool of one costs a wake-up per call and gains nothing.
pub fn for_each<T: Send>(tasks: Vec<T>, op: impl Fn(T) + Sync + Send) {
    if tasks.len() < 2 || rayon::current_num_threads() == 1 {
        tasks.into_iter().for_each(op);
    } else {
        tasks.into_par_iter().for_each(op);
    }
}
