//! Rotary embedding and attention on an accelerator.

use burn::tensor::{DType, Tensor, backend::Backend};
use burn_cubecl::{
    BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement, kernel::into_contiguous,
    tensor::CubeTensor,
};
use half::{bf16, f16};

use super::{
    flash::{self, AttentionInputs, AttentionPull},
    launch::{floats, strided_floats, wrapped},
    rotary, scores,
};
use crate::kernels::{
    AttentionMask, AttentionOps, AttentionOutput, AttentionSaved,
    blockwise::{self, TiledInputs},
    segments,
};

impl<R, F, I, BT> AttentionOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn rotary(
        x_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        let [y] = rotary::rotary([strided_floats(x_bshk)], 1, Some([cos_bsk, sin_bsk].map(floats)));
        wrapped(y)
    }

    fn rotary_backward(
        dy_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        let [dx] =
            rotary::rotary_backward([strided_floats(dy_bshk)], 1, Some([cos_bsk, sin_bsk].map(floats)));
        wrapped(dx)
    }

    fn rope(inputs_bshk: [Tensor<Self, 4>; 3], tables_bsk: [Tensor<Self, 3>; 2]) -> [Tensor<Self, 4>; 3] {
        rotary::rotary(inputs_bshk.map(strided_floats), 2, Some(tables_bsk.map(floats))).map(wrapped)
    }

    fn rope_backward(
        gradients_bshk: [Tensor<Self, 4>; 3],
        tables_bsk: [Tensor<Self, 3>; 2],
    ) -> [Tensor<Self, 4>; 3] {
        rotary::rotary_backward(gradients_bshk.map(strided_floats), 2, Some(tables_bsk.map(floats)))
            .map(wrapped)
    }

    fn rope_backward_joined(
        gradients_bshk: [Tensor<Self, 4>; 3],
        tables_bsk: [Tensor<Self, 3>; 2],
        to: Option<DType>,
    ) -> Tensor<Self, 2> {
        let (gradients, tables) = (gradients_bshk.map(strided_floats), Some(tables_bsk.map(floats)));
        wrapped(match to {
            None => rotary::rotary_backward_joined::<R, f32, 3>(gradients, 2, tables),
            Some(DType::F16) => rotary::rotary_backward_joined::<R, f16, 3>(gradients, 2, tables),
            Some(_) => rotary::rotary_backward_joined::<R, bf16, 3>(gradients, 2, tables),
        })
    }

    fn attention_inputs(inputs_bshk: [Tensor<Self, 4>; 3], mask: &AttentionMask) -> [Tensor<Self, 4>; 3] {
        let as_they_are = mask.segments().is_some() || flash::fuses(&inputs_bshk[0]);
        let inputs = inputs_bshk.map(strided_floats);
        // The kernel works in pairs along a head: attention copies what is odd.
        let is_odd = !inputs.iter().all(rotary::has_pairs);
        if is_odd || as_they_are || inputs.iter().all(scores::lies_by_head) {
            return inputs.map(wrapped);
        }
        rotary::rotary(inputs, 0, None).map(wrapped)
    }

    fn attention_gradients(gradients_bshk: [Tensor<Self, 4>; 3]) -> [Tensor<Self, 4>; 3] {
        let gradients = gradients_bshk.map(strided_floats);
        if gradients.iter().all(CubeTensor::is_contiguous) {
            return gradients.map(wrapped);
        }
        if !gradients.iter().all(rotary::has_pairs) {
            return gradients.map(into_contiguous).map(wrapped);
        }
        rotary::rotary_backward(gradients, 0, None).map(wrapped)
    }

    fn attention_saving(
        q_bshk: Tensor<Self, 4>,
        k_bshk: Tensor<Self, 4>,
        v_bshk: Tensor<Self, 4>,
        mask: &AttentionMask,
        scale: f64,
    ) -> AttentionOutput<Self> {
        let inputs_bshk = Self::attention_inputs([q_bshk, k_bshk, v_bshk], mask);
        let fuses = flash::fuses(&inputs_bshk[0]);
        segments::attention(inputs_bshk, mask, |inputs_bshk, mask| {
            if !fuses {
                return blockwise::attention(TiledInputs::new(inputs_bshk, scale), mask);
            }
            let [out, lse] = flash::attention(attending(inputs_bshk, mask, scale));
            AttentionOutput { out_bshk: wrapped(out), lse_bsh: Some(wrapped(lse)) }
        })
    }

    fn attention_backward(
        saved: AttentionSaved<Self>,
        mask: &AttentionMask,
        scale: f64,
        dout_bshk: Tensor<Self, 4>,
    ) -> [Tensor<Self, 4>; 3] {
        let fuses = flash::fuses(&saved.q_bshk);
        segments::gradients(saved, mask, dout_bshk, |saved, mask, dout_bshk| {
            let AttentionSaved { q_bshk, k_bshk, v_bshk, output } = saved;
            let inputs_bshk = [q_bshk, k_bshk, v_bshk];
            if !fuses {
                return blockwise::gradients(TiledInputs::new(inputs_bshk, scale), output, mask, dout_bshk);
            }
            let lse_bsh = floats(output.lse());
            let [dout_bshk, out_bshk] = [dout_bshk, output.out_bshk].map(strided_floats);
            let pull = AttentionPull { dout_bshk, out_bshk, lse_bsh };
            flash::gradients(attending(inputs_bshk, mask, scale), pull).map(wrapped)
        })
    }
}

/// What one kernel attends with.
fn attending<B, R>(inputs_bshk: [Tensor<B, 4>; 3], mask: &AttentionMask, scale: f64) -> AttentionInputs<R>
where
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let bounds = blockwise::bounds(mask, inputs_bshk[1].dims()[1], &inputs_bshk[0]);
    let ([q_bshk, k_bshk, v_bshk], bounds) =
        (inputs_bshk.map(strided_floats), bounds.map(scores::whole_numbers));
    AttentionInputs { q_bshk, k_bshk, v_bshk, bounds, causal: mask.is_causal_batch(), scale }
}
