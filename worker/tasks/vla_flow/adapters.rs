//! LoRA in an expert that is brought: which of its linears `lora.targets` means, and their weights with what
//! the adapters have learned.
//!
//! Its modules are called `expert.blocks.0.attn.q`, as in `expert.safetensors`, and are matched by PEFT's
//! rules like those of the pretrained model, with which they share rank, alpha and patterns. `all-linear`
//! means the pretrained model's alone. Adapters are of the group `expert`, so that they train in steps from
//! kept features as well.
//!
//! A run leaves the expert with its adapters merged: what loads it needs to know nothing of them. What
//! this file does not do: run adapters (`coxswain_nn::dense`).

use coxswain_models::vision_language::ModelOutline;
use coxswain_nn::{
    lora::{Lora, LoraError, LoraPlan, LoraTargets, Module, ModuleKind, targets::Targets},
    params::{ParamSpec, TrainableLayout},
};

use super::{
    EXPERT,
    config::VlaSettings,
    data::SampleDims,
    expert::{Learning, ModelSizes},
    head::HeadShape,
};

/// What a run's section `lora` means.
#[derive(Clone, Debug, Default)]
pub struct Split {
    /// For the pretrained model.
    pub model: Option<Lora>,
    /// For the expert.
    pub expert: Option<LoraPlan>,
}

impl Split {
    /// The split in a run on this model. Only an expert that does not train itself takes adapters.
    pub fn from_settings(vla: &VlaSettings, model: &ModelOutline) -> Result<Self, LoraError> {
        let Some(lora) = &vla.lora else { return Ok(Self::default()) };
        let whole = Self { model: Some(lora.clone()), expert: None };
        if vla.expert.train {
            return Ok(whole);
        }
        // Of the sizes of samples, what its modules are called depends on whether there is a state.
        let dims = SampleDims { state: usize::from(vla.data.has_state()), ..SampleDims::default() };
        let experts = modules(HeadShape::from_settings(vla, ModelSizes { width: 1, ..model.into() }, dims));
        let Some(ours) = with_targets(lora, |targets| means_any(targets, &experts))? else {
            return Ok(whole);
        };
        if lora.use_dora {
            let problem = "is true, but lora.targets matches linears of the expert, which does not support DoRA; target only the vision-language model, or set lora.use_dora to false";
            return Err(LoraError::Setting { field: "lora.use_dora".into(), problem: problem.into() });
        }
        // What nothing is called is left to the model's part, which says so.
        let of_model =
            |targets: &_| Ok(means_any(targets, &model.modules)? || !means_any(targets, &experts)?);
        let model = with_targets(lora, of_model)?;
        Ok(Self { model, expert: Some(LoraPlan::resolve(&ours, &experts)?) })
    }
}

/// The section with the wanted names of its list, or its expression, alone; none if none are left.
fn with_targets(
    lora: &Lora,
    wanted: impl Fn(&LoraTargets) -> Result<bool, LoraError>,
) -> Result<Option<Lora>, LoraError> {
    let LoraTargets::Suffixes(names) = &lora.targets else {
        return Ok(wanted(&lora.targets)?.then(|| lora.clone()));
    };
    let mut left = Vec::new();
    for name in names {
        if wanted(&LoraTargets::Suffixes(vec![name.clone()]))? {
            left.push(name.clone());
        }
    }
    let none = left.is_empty();
    Ok((!none).then(|| Lora { targets: LoraTargets::Suffixes(left), ..lora.clone() }))
}

/// Whether targets name one of these linears.
fn means_any(targets: &LoraTargets, modules: &[Module]) -> Result<bool, LoraError> {
    if matches!(targets, LoraTargets::Regex(text) if text.eq_ignore_ascii_case("all-linear")) {
        return Ok(modules.iter().any(|module| !module.name.starts_with("expert.")));
    }
    let targets = Targets::new(targets, "lora.targets")?;
    for module in modules.iter().filter(|module| matches!(module.kind, ModuleKind::Linear { .. })) {
        if targets.matches(&module.name)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The linears of an expert.
pub fn modules(shape: impl Into<HeadShape>) -> Vec<Module> {
    let mut layout = TrainableLayout::default();
    shape.into().register(&mut layout, Learning::Nothing);
    let linear = |name: &str, shape: &[usize]| {
        let (name, [outputs, inputs]) = (name.strip_suffix(".weight")?, *shape.first_chunk::<2>()?);
        let kind = ModuleKind::Linear { inputs, outputs, bias: false, head: false };
        Some(Module { name: name.into(), old_name: name.into(), kind })
    };
    layout.constants().iter().filter_map(|constant| linear(&constant.name, &constant.shape)).collect()
}

/// Whether a tensor is part of an expert's adapter.
pub fn is_beside(param: &ParamSpec) -> bool {
    param.group == EXPERT && param.name.contains(".lora_")
}

#[cfg(test)]
mod tests {
    use coxswain_models::families;
    use coxswain_nn::kernels::sizes::Sizes;
    use serde_json::json;

    use super::*;
    use crate::vla_flow::{
        config::VlaSpec,
        testing::small::{MODEL, spec},
    };

    fn split(lora: serde_json::Value, train: bool) -> Result<Split, String> {
        let mut spec = spec(&[("lora", lora)]);
        spec.vla_mut().expert.train = train;
        let family = families::shelf::<Sizes>().vision_language.of(MODEL.as_ref()).expect("its own is read");
        let model = family.outline(MODEL.as_ref()).expect("part of the repository");
        Split::from_settings(&spec.vla(), &model).map_err(|error| error.to_string())
    }

    fn names(split: &Split) -> Vec<&str> {
        split.expert.iter().flat_map(|plan| plan.adapters()).map(|(name, _)| name).collect()
    }

    #[test]
    fn each_name_goes_where_something_is_called_so() {
        let targets = json!(["q_proj", "attn.q", "expert.state", "nobody"]);
        let both = split(json!({"rank": 2, "targets": targets}), false).expect("both have some");
        let ours = ["expert.blocks.0.attn.q", "expert.blocks.1.attn.q", "expert.state"];
        assert_eq!(names(&both), ours);
        let left = LoraTargets::Suffixes(["q_proj", "nobody"].map(str::to_owned).into());
        assert_eq!(both.model.map(|lora| lora.targets), Some(left));

        let expert = split(json!({"rank": 2, "targets": ["mlp.in"], "rank_pattern": {"0.mlp.in": 3}}), false);
        let expert = expert.expect("the model is left alone");
        assert!(expert.model.is_none());
        let ranks: Vec<_> =
            expert.expert.iter().flat_map(|plan| plan.adapters()).map(|(_, spec)| spec.rank).collect();
        assert_eq!(ranks, [3, 2]);
    }

    #[test]
    fn an_expression_means_both_or_one() {
        let with =
            |targets: &str| split(json!({"rank": 2, "targets": targets}), false).expect("it means some");
        let both = with(r".*(language_model.*q_proj|expert\.blocks\.1\.attn\.(q|v))");
        assert_eq!(names(&both), ["expert.blocks.1.attn.q", "expert.blocks.1.attn.v"]);
        assert!(both.model.is_some());
        assert!(with(r"expert\..*").model.is_none());
        for of_model in ["all-linear", r".*q_proj"] {
            let split = with(of_model);
            assert!(split.expert.is_none() && split.model.is_some(), "{of_model}");
        }
    }

    #[test]
    fn an_expert_that_trains_takes_none_and_magnitudes_are_refused() {
        let split_of = |lora, train| split(lora, train).map(|split| split.expert.is_some());
        assert_eq!(split_of(json!({"targets": ["q_proj", "attn.q"]}), true), Ok(false));
        let message = split_of(json!({"targets": ["q_proj", "attn.q"], "use_dora": true}), false);
        assert!(message.expect_err("refused").starts_with("lora.use_dora: is true"));
        assert_eq!(split_of(json!({"targets": ["q_proj"], "use_dora": true}), false), Ok(false));
    }
}
