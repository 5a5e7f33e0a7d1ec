//! The operations that the model needs of a backend, together: [`ModelBackend`].

use burn::tensor::{Tensor, TensorData, backend::ExecutionError};

use super::{attention_ops::AttentionOps, flat_ops::FlatOps, linear_ops::LinearOps, row_ops::RowOps};

/// A backend that the model runs on.
///
/// In each part the methods named `_backward`, `_gradient` and `_saving` are for the autodiff nodes. Whatever
/// a backend does not do by itself, [`reference`](super::reference) and [`backward`](super::backward) do on
/// its tensors.
pub trait ModelBackend: RowOps + AttentionOps + LinearOps + FlatOps {
    /// Whether its tensors lie in host memory: one made of a mapped file's bytes is those bytes then.
    const ON_HOST: bool = false;

    /// Whether its tensors have values: false where sizes are all there is ([`sizes`](super::sizes)), and
    /// then nothing is read or drawn for them.
    const VALUES: bool = true;

    /// Whether linear layers of one input are worth joining ([`LinearOps::joined`]) on a device: where a
    /// product costs a launch.
    fn joins(_device: &Self::Device) -> bool {
        false
    }

    /// Whether products round what they read to the type of a narrower weight, so that it may as well be
    /// rounded before.
    fn rounds(_device: &Self::Device) -> bool {
        false
    }

    /// Whether weights of few bits are kept on the device and widened there for each product
    /// ([`unpacked`](super::WeightOps::unpacked)): where products read no host memory.
    fn unpacks(_device: &Self::Device) -> bool {
        false
    }

    /// These values in one row on a device: through page-locked memory, where the device copies from that by
    /// itself.
    fn bring(mut data: TensorData, device: &Self::Device) -> Tensor<Self, 1> {
        let dtype = data.dtype;
        data.shape = [data.num_elements()].into();
        Tensor::from_data(data, (device, dtype))
    }

    /// Hands over to a device everything it was told to do, and says what it could not take: memory that was
    /// refused is known then. Waits for what was handed over before the last time, no further: host memory
    /// of uploads is let go until there.
    fn flush(_device: &Self::Device) -> Result<(), ExecutionError> {
        Ok(())
    }
}
