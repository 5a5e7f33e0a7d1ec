//! The thread that computes for a run.

use coxswain_nn::kernels::{pool, precision};
use coxswain_proto::run_spec::RunSpec;

/// From here on the calling thread computes, with others of its own, and multiplies as the run says.
pub(crate) fn begin_computing(spec: &RunSpec) {
    precision::allow_bfloat16_matmul(spec.launch.bfloat16_matmul);
    pool::join();
}
