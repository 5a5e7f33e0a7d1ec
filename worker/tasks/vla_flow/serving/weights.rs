//! What a run has trained, from the files that it has left.

use std::path::Path;

use coxswain_models::{
    Shelf,
    pretrained::{directory, error::ModelError},
};
use coxswain_nn::{
    kernels::sizes::Sizes,
    params::{Group, TrainableLayout},
};
use coxswain_proto::{bounded, run_spec::RunSpec};
use coxswain_task::TaskError;
use safetensors::{Dtype, SafeTensors};

use crate::{
    pretrained::ADAPTER_DIR,
    vla_flow::{adapters::Split, config::VlaSettings, objective::GROUPS},
};

/// A run like this one, whose adapter begins as the one in `dir`. Whatever it trained of the expert, `dir`
/// has all of it, adapters merged.
pub fn with_adapter_of(
    spec: &RunSpec,
    models: Shelf<Sizes>,
    mut settings: VlaSettings,
    dir: &Path,
) -> Result<RunSpec, TaskError> {
    let mut spec = spec.clone();
    if !settings.expert.train {
        let base = directory::outline(&settings.model.path).map_err(ModelError::from);
        let model = base.and_then(|base| models.vision_language.of(&base)?.outline(&base));
        let model = model.map_err(TaskError::bad_input)?;
        settings.lora = Split::from_settings(&settings, &model).map_err(TaskError::bad_input)?.model;
        settings.expert.train = true;
    }
    if let Some(lora) = &mut settings.lora {
        lora.init_from = Some(dir.join(ADAPTER_DIR).to_string_lossy().into_owned());
    }
    spec.set_settings(&settings);
    Ok(spec)
}

/// Puts the values of all groups but the adapter's, which has a format of its own, in their places.
pub fn fill(dir: &Path, layout: &TrainableLayout, values: &mut [f32]) -> Result<(), TaskError> {
    for (group, artifact) in GROUPS {
        fill_group(&dir.join(artifact.path), group, layout, values)?;
    }
    let filled = |group: Group| group == Group::LORA || GROUPS.iter().any(|(known, _)| *known == group);
    match layout.params().iter().find(|param| !filled(param.group)) {
        None => Ok(()),
        Some(param) => Err(TaskError::bad_input(format!("{}: not in any of the run's files", param.name))),
    }
}

fn fill_group(
    path: &Path,
    group: Group,
    layout: &TrainableLayout,
    values: &mut [f32],
) -> Result<(), TaskError> {
    let mut params = layout.params().iter().filter(|param| param.group == group).peekable();
    if params.peek().is_none() {
        return Ok(());
    }
    let at = |problem: String| TaskError::bad_input(format!("{}: {problem}", path.display()));
    let bytes = bounded::read(path, u64::MAX).map_err(|error| {
        TaskError::io(format!("cannot read {}: {error}; name a finished run's directory", path.display()))
    })?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|error| at(format!("not a safetensors file ({error}); copy it again")))?;
    for param in params {
        let tensor = file.tensor(&param.name).map_err(|_| {
            at(format!("no tensor {}; file and run_spec.json must come from the same run", param.name))
        })?;
        if tensor.dtype() != Dtype::F32 || tensor.shape() != param.shape {
            return Err(at(format!(
                "{} is {:?} {:?}, expected F32 {:?}",
                param.name,
                tensor.dtype(),
                tensor.shape(),
                param.shape
            )));
        }
        let place: &mut [u8] = bytemuck::cast_slice_mut(&mut values[param.range()]);
        place.copy_from_slice(tensor.data());
    }
    Ok(())
}
