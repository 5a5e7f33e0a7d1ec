//! Which modules of the pretrained model train in full (`model.train`; PEFT's `modules_to_save`).
//!
//! A pattern means a module if it matches the end of its path, from the start or from after a dot, or that of
//! a module that it is part of: `visual\.merger` is the merger with everything in it. Of a module all tensors
//! train, so that PEFT's `modules_to_save` can name it.
//!
//! What this file does not do: hold weights ([`params::BaseWeight`](crate::params::BaseWeight)).

use std::collections::BTreeSet;

use coxswain_proto::config::Findings;
use fancy_regex::Regex;

use super::{
    error::LoraError,
    module::{Module, ModuleKind},
    plan::LoraPlan,
};

/// The key that says which.
pub const TRAIN: &str = "model.train";

/// Modules that train in full: linears, norms, the patch embedding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrainedModules(BTreeSet<String>);

impl TrainedModules {
    /// Applies patterns to a model's modules. An error if one matches nothing, or something that cannot
    /// train, or what `lora` adapts.
    pub fn resolve(
        patterns: &[String],
        modules: &[Module],
        lora: Option<&LoraPlan>,
    ) -> Result<Self, LoraError> {
        let mut trained = BTreeSet::new();
        for pattern in patterns {
            let regex = compiled(pattern)?;
            let before = trained.len();
            let mut matched = false;
            for module in modules.iter().filter(|module| has_weights(module)) {
                if !regex.is_match(&module.name).map_err(|source| unusable(pattern, source))? {
                    continue;
                }
                if let Some(why) = refused(module, lora) {
                    return Err(setting(format!("`{pattern}` matches `{}`, {why}", module.name)));
                }
                matched = true;
                trained.insert(module.name.clone());
            }
            if !matched {
                return Err(setting(format!("`{pattern}` {}", nothing(modules))));
            }
            if trained.len() == before {
                tracing::warn!(field = TRAIN, %pattern, "pattern adds nothing to those before it");
            }
        }
        Ok(Self(trained))
    }

    /// What PEFT's `modules_to_save` means: modules whose paths end so, with everything in them.
    pub(super) fn saved(names: &[String], modules: &[Module]) -> Result<Self, String> {
        let mut trained = BTreeSet::new();
        for name in names {
            let is_meant = |path: &str| {
                let ends = path.match_indices('.').map(|(dot, _)| dot).chain([path.len()]);
                ends.into_iter().any(|end| path[..end].ends_with(name.as_str()))
            };
            let meant = modules.iter().filter(|module| has_weights(module));
            let meant = meant.filter(|module| is_meant(&module.name) || is_meant(&module.old_name));
            let before = trained.len();
            for module in meant {
                if let Some(why) = refused(module, None) {
                    return Err(format!("{name:?} means `{}`, {why}", module.name));
                }
                trained.insert(module.name.clone());
            }
            if trained.len() == before {
                return Err(format!("{name:?} means no module of the model that has weights"));
            }
        }
        Ok(Self(trained))
    }

    /// Whether a module trains.
    pub fn contains(&self, module: &str) -> bool {
        self.0.contains(module)
    }

    /// Whether a tensor of a checkpoint trains, by its name.
    pub fn trains(&self, tensor: &str) -> bool {
        tensor.rsplit_once('.').is_some_and(|(module, _)| self.contains(module))
    }

    /// Those that are not among `others`.
    pub fn beyond<'a>(&'a self, others: &'a Self) -> impl Iterator<Item = &'a str> {
        self.iter().filter(|module| !others.contains(module))
    }

    /// Their paths.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// True when nothing trains in full.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The rules for patterns, whatever the model.
pub fn check_train(patterns: &[String], f: &mut Findings) {
    for pattern in patterns {
        super::settings::check_pattern(TRAIN, pattern, f);
    }
}

fn compiled(pattern: &str) -> Result<Regex, LoraError> {
    let regex = Regex::new(&format!(r"\A(?:.*\.)?(?:{pattern})(?:\..*)?\z"));
    regex.map_err(|source| unusable(pattern, source))
}

fn unusable(pattern: &str, source: fancy_regex::Error) -> LoraError {
    LoraError::Pattern { field: TRAIN.into(), pattern: pattern.into(), source: Box::new(source) }
}

/// Whether a module has tensors of its own.
fn has_weights(module: &Module) -> bool {
    module.kind != ModuleKind::Other
}

/// Why a module cannot train in full.
fn refused(module: &Module, lora: Option<&LoraPlan>) -> Option<&'static str> {
    match module.kind {
        ModuleKind::Embedding => Some(
            "the token embedding, which cannot train; leave it out, for instance with `language_model\\.layers`",
        ),
        ModuleKind::Linear { head: true, .. } => {
            Some("the LM head, which cannot train; leave it out, for instance with `language_model\\.layers`")
        }
        _ if lora.is_some_and(|plan| plan.adapter(&module.name).is_some()) => {
            Some("which has a LoRA adapter; take it out of lora.targets, or out of this key")
        }
        _ => None,
    }
}

fn nothing(modules: &[Module]) -> String {
    let norms = modules.iter().find(|module| module.kind == ModuleKind::Norm);
    let example = norms.map_or("model.visual.merger.ln_q", |module| module.name.as_str());
    format!(
        "matches no module of the model that has weights; paths look like `{example}`, and a pattern must match a path's end from after a dot, or that of a module that holds it, such as `visual\\.merger`"
    )
}

fn setting(problem: String) -> LoraError {
    LoraError::Setting { field: TRAIN.into(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules() -> Vec<Module> {
        let linear = ModuleKind::Linear { inputs: 4, outputs: 4, head: false };
        let named = [
            ("model.visual", ModuleKind::Other),
            ("model.visual.patch_embed.proj", ModuleKind::Convolution),
            ("model.visual.blocks.1.norm1", ModuleKind::Norm),
            ("model.visual.blocks.12.norm1", ModuleKind::Norm),
            ("model.visual.merger", ModuleKind::Other),
            ("model.visual.merger.ln_q", ModuleKind::Norm),
            ("model.visual.merger.mlp.0", linear),
            ("model.visual.merger.mlp.1", ModuleKind::Other),
            ("model.language_model.embed_tokens", ModuleKind::Embedding),
            ("model.language_model.layers.0.self_attn.q_proj", linear),
            ("lm_head", ModuleKind::Linear { inputs: 4, outputs: 4, head: true }),
        ];
        named.map(|(name, kind)| Module { name: name.into(), old_name: name.into(), kind }).into()
    }

    fn resolved(pattern: &str) -> Result<Vec<String>, String> {
        let trained = TrainedModules::resolve(&[pattern.to_owned()], &modules(), None);
        trained.map(|trained| trained.0.into_iter().collect()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_pattern_means_modules_and_everything_in_them() {
        let merger = ["model.visual.merger.ln_q", "model.visual.merger.mlp.0"].map(str::to_owned);
        for pattern in [r"visual\.merger", r"visual\.merger\..*", r"model\.visual\.merger", "merger"] {
            assert_eq!(resolved(pattern).as_deref(), Ok(&merger[..]), "{pattern}");
        }
        assert_eq!(resolved("visual").map(|found| found.len()), Ok(5));
        assert_eq!(resolved("norm1").map(|found| found.len()), Ok(2));
        assert_eq!(resolved(r"blocks\.1"), Ok(vec!["model.visual.blocks.1.norm1".into()]));
    }

    #[test]
    fn what_matches_nothing_or_cannot_train_is_refused_by_name() {
        for (pattern, reported) in [
            ("merge", "`merge` matches no module"),
            (r"mlp\.1", "matches no module of the model that has weights"),
            (".*", "`model.language_model.embed_tokens`, the token embedding"),
            ("lm_head", "`lm_head`, the LM head"),
            ("(", "not a regular expression"),
        ] {
            let message = resolved(pattern).expect_err("refused");
            assert!(message.starts_with("model.train: ") && message.contains(reported), "{message}");
        }
        let lora = crate::lora::Lora {
            targets: crate::lora::LoraTargets::Suffixes(vec!["q_proj".into()]),
            ..Default::default()
        };
        let plan = LoraPlan::resolve(&lora, &modules()).expect("it has a q_proj");
        let both = TrainedModules::resolve(&[r"layers\.0".into()], &modules(), Some(&plan));
        let message = both.expect_err("both at once").to_string();
        assert!(message.contains("q_proj`, which has a LoRA adapter"), "{message}");
    }

    #[test]
    fn peft_means_the_ends_of_paths_and_what_is_in_them() {
        let saved = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            TrainedModules::saved(&names, &modules()).map(|saved| saved.0.into_iter().collect::<Vec<_>>())
        };
        assert_eq!(saved(&["merger"]), resolved("merger"));
        assert_eq!(saved(&["model.visual.merger.mlp.0"]), resolved(r"mlp\.0"));
        assert!(saved(&["lm_head"]).expect_err("no head").contains("the LM head"));
        assert!(saved(&["nowhere"]).expect_err("no such module").contains("no module"));
    }

    #[test]
    fn a_tensor_trains_with_its_module() {
        let trained = TrainedModules::resolve(&[r"mlp\.0".into()], &modules(), None).expect("it is there");
        assert!(trained.trains("model.visual.merger.mlp.0.bias"));
        assert!(!trained.trains("model.visual.merger.ln_q.weight") && !trained.is_empty());
    }
}
