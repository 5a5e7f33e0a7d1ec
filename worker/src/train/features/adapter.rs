//! A generation's adapter as the store keeps it, and back.

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::{model::policy::AdapterSnapshot, params::TrainableLayout, vl_cache::AdapterTensor};

/// As the store keeps it.
pub(super) fn tensors(adapter: &AdapterSnapshot) -> Vec<AdapterTensor> {
    let bytes = adapter.to_bytes();
    let file = SafeTensors::deserialize(&bytes).expect("a snapshot writes what can be read");
    let tensor = |(name, view): (&str, TensorView<'_>)| AdapterTensor {
        name: name.to_owned(),
        shape: view.shape().to_vec(),
        values: view.data().as_chunks::<4>().0.iter().map(|le| f32::from_le_bytes(*le)).collect(),
    };
    file.iter().map(tensor).collect()
}

/// What the store kept, for a run of this layout; in words why not, if it does not fit.
pub(super) fn snapshot(
    layout: &TrainableLayout,
    tensors: &[AdapterTensor],
) -> Result<AdapterSnapshot, String> {
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|t| t.values.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
    let views = tensors.iter().zip(&bytes).map(|(tensor, bytes)| {
        let view = TensorView::new(Dtype::F32, tensor.shape.clone(), bytes);
        view.map(|view| (tensor.name.as_str(), view))
    });
    let views = views.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
    let file = safetensors::serialize(views, None).map_err(|error| error.to_string())?;
    AdapterSnapshot::from_bytes(layout, &file).map_err(|error| error.to_string())
}
