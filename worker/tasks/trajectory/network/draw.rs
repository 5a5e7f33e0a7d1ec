//! The latent of a variational autoencoder (arXiv 1312.6114), and how far its distribution is from the
//! standard normal one.
//!
//! ```text
//! z  = mean + exp(log_variance / 2) * noise
//! kl = 1/2 sum(mean^2 + exp(log_variance) - log_variance - 1)     of each row, appendix B there
//! ```

use burn::tensor::Tensor;
use coxswain_nn::{kernels::Tape, params::ParamScope, recompute::segment::Segment};

/// From codes `[n, 2 z]` and noise `[n, z]` to latents and divergences side by side, `[n, z + 1]`.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// Numbers of a latent.
    pub latent: usize,
}

impl<B: Tape<Base = B>> Segment<B> for Draw {
    fn run<T: Tape<Base = B>>(&self, _params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let z = self.latent;
        let [mean_nz, log_nz] = [0, z].map(|first| inputs[0].clone().narrow(1, first, z));
        let drawn_nz = mean_nz.clone() + (log_nz.clone() * 0.5).exp() * inputs[1].clone();
        let each_nz = mean_nz.clone() * mean_nz + log_nz.clone().exp() - log_nz - 1.0;
        Tensor::cat(vec![drawn_nz, each_nz.sum_dim(1) * 0.5], 1)
    }
}
