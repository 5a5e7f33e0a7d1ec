//! Which modules of the pretrained model train in full (`model.train`; PEFT's `modules_to_save`).
//!
//! A pattern means a module if it matches the end of its path, from the start or from after a dot, or that of
//! a module that it is part of: `visual\.merger` is the merger with everything in it. Of a module all tensors
//! train, so that PEFT's `modules_to_save` can name it.
//!
//! Where the token embedding is the LM head's weight as well (`tie_word_embeddings`), either name means the
//! one table, as `requires_grad` on a tied parameter does.
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
/// The LM head's path.
pub const HEAD: &str = "lm_head";

/// Modules that train in full: linears, norms, the two embeddings.
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
                trained.insert(holder(module, modules).name.clone());
            }
            if !matched {
                return Err(setting(format!("`{pattern}` {}", nothing(modules))));
            }
            if trained.len() == before {
                tracing::warn!(field = TRAIN, %pattern, "pattern has no effect: earlier patterns match the same modules");
            }
        }
        Ok(Self(trained))
    }

    /// What PEFT's `modules_to_save` means: modules whose paths end so, with everything in them. `tying` is
    /// its `ensure_weight_tying`: without it PEFT trains an embedding apart from the head that it is tied to.
    pub(super) fn saved(names: &[String], tying: bool, modules: &[Module]) -> Result<Self, String> {
        let tied = tied_table(modules);
        let mut trained = BTreeSet::new();
        for name in names {
            let is_meant = |path: &str| {
                let ends = path.match_indices('.').map(|(dot, _)| dot).chain([path.len()]);
                ends.into_iter().any(|end| path[..end].ends_with(name.as_str()))
            };
            let meant = modules.iter().filter(|module| has_weights(module));
            let meant = meant.filter(|module| is_meant(&module.name) || is_meant(&module.old_name));
            let mut matched = false;
            for module in meant {
                let holder = holder(module, modules);
                if !tying && tied.is_some_and(|table| table.name == holder.name) {
                    return Err(format!(
                        "{name:?} matches `{}`, which PEFT trained separately, but this model ties embedding and \
                         lm_head (tie_word_embeddings). If nothing uses the logits, set `ensure_weight_tying` to \
                         true here; otherwise train the adapter again with that setting, or untie the model",
                        module.name
                    ));
                }
                matched = true;
                trained.insert(holder.name.clone());
            }
            if !matched {
                return Err(format!("{name:?} matches no module of the model that has weights"));
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

    /// The modules that are not among `others`.
    pub fn beyond<'a>(&'a self, others: &'a Self) -> impl Iterator<Item = &'a str> {
        self.iter().filter(|module| !others.contains(module))
    }

    /// Paths.
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

/// The token embedding, if its table is the LM head's as well.
pub(super) fn tied_table(modules: &[Module]) -> Option<&Module> {
    modules.iter().find(|module| matches!(module.kind, ModuleKind::Embedding { tied: true, .. }))
}

/// The module under whose name this one's weight is: of a tied head, the embedding.
fn holder<'a>(module: &'a Module, modules: &'a [Module]) -> &'a Module {
    match module.kind {
        ModuleKind::Linear { head: true, .. } => tied_table(modules).unwrap_or(module),
        _ => module,
    }
}

/// Why a module cannot train in full.
pub(super) fn refused(module: &Module, lora: Option<&LoraPlan>) -> Option<&'static str> {
    let adapted = |name: &str| lora.is_some_and(|plan| plan.adapter(name).is_some());
    match module.kind {
        ModuleKind::Embedding { tied: true, .. } if adapted(HEAD) => Some(
            "which shares its weight with lm_head, and lm_head has a LoRA adapter; remove lm_head from lora.targets, or this module from model.train",
        ),
        _ if adapted(&module.name) => {
            Some("which has a LoRA adapter; remove it from lora.targets or from model.train")
        }
        _ => None,
    }
}

fn nothing(modules: &[Module]) -> String {
    let norms = modules.iter().find(|module| matches!(module.kind, ModuleKind::Norm { .. }));
    let example = norms.map_or("model.visual.merger.ln_q", |module| module.name.as_str());
    format!(
        "matches no module of the model that has weights; paths look like `{example}`. A pattern must match the last parts of a module's path, or of a parent module's path, such as `visual\\.merger`"
    )
}

fn setting(problem: String) -> LoraError {
    LoraError::Setting { field: TRAIN.into(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules() -> Vec<Module> {
        modules_of(false)
    }

    fn modules_of(tied: bool) -> Vec<Module> {
        let linear = ModuleKind::Linear { inputs: 4, outputs: 4, bias: false, head: false };
        let named = [
            ("model.visual", ModuleKind::Other),
            ("model.visual.patch_embed.proj", ModuleKind::Convolution { shape: [4; 5], bias: false }),
            ("model.visual.blocks.1.norm1", ModuleKind::Norm { width: 4, bias: false }),
            ("model.visual.blocks.12.norm1", ModuleKind::Norm { width: 4, bias: false }),
            ("model.visual.merger", ModuleKind::Other),
            ("model.visual.merger.ln_q", ModuleKind::Norm { width: 4, bias: false }),
            ("model.visual.merger.mlp.0", linear),
            ("model.visual.merger.mlp.1", ModuleKind::Other),
            ("model.language_model.embed_tokens", ModuleKind::Embedding { rows: 4, width: 4, tied }),
            ("model.language_model.layers.0.self_attn.q_proj", linear),
            ("lm_head", ModuleKind::Linear { inputs: 4, outputs: 4, bias: false, head: true }),
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
        assert_eq!(resolved(".*").map(|found| found.len()), Ok(8));
        assert_eq!(resolved("model").map(|found| found.len()), Ok(7), "all but the head");
        assert_eq!(resolved("norm1").map(|found| found.len()), Ok(2));
        assert_eq!(resolved(r"blocks\.1"), Ok(vec!["model.visual.blocks.1.norm1".into()]));
    }

    #[test]
    fn what_matches_nothing_or_cannot_train_is_refused_by_name() {
        for (pattern, reported) in [
            ("merge", "`merge` matches no module"),
            (r"mlp\.1", "matches no module of the model that has weights"),
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
    fn a_tied_head_is_the_embedding_by_either_name() {
        let table = Ok(vec!["model.language_model.embed_tokens".to_owned()]);
        let resolved = |pattern: &str, tied: bool, lora: Option<&LoraPlan>| {
            let trained = TrainedModules::resolve(&[pattern.to_owned()], &modules_of(tied), lora);
            trained
                .map(|trained| trained.0.into_iter().collect::<Vec<_>>())
                .map_err(|error| error.to_string())
        };
        for pattern in ["embed_tokens", "lm_head", "embed_tokens|lm_head"] {
            assert_eq!(resolved(pattern, true, None), table, "{pattern}");
        }
        assert_eq!(resolved("embed_tokens", false, None), table);
        assert_eq!(resolved("lm_head", false, None), Ok(vec!["lm_head".into()]));
        let targets = crate::lora::LoraTargets::Suffixes(vec!["lm_head".into()]);
        let lora = crate::lora::Lora { targets, ..Default::default() };
        let plan = LoraPlan::resolve(&lora, &modules()).expect("it has a head");
        assert_eq!(resolved("embed_tokens", false, Some(&plan)), table);
        for pattern in ["embed_tokens", "lm_head"] {
            let message = resolved(pattern, true, Some(&plan)).expect_err("one table, adapted and trained");
            assert!(message.contains("has a LoRA adapter"), "{message}");
        }
        let saved = |tying, tied| TrainedModules::saved(&["embed_tokens".into()], tying, &modules_of(tied));
        assert_eq!(saved(true, true), saved(false, false));
        let message = saved(false, true).expect_err("two tables there, one here");
        assert!(message.contains("ensure_weight_tying"), "{message}");
    }

    #[test]
    fn peft_means_the_ends_of_paths_and_what_is_in_them() {
        let saved = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            TrainedModules::saved(&names, false, &modules())
                .map(|saved| saved.0.into_iter().collect::<Vec<_>>())
        };
        assert_eq!(saved(&["merger"]), resolved("merger"));
        assert_eq!(saved(&["model.visual.merger.mlp.0"]), resolved(r"mlp\.0"));
        assert_eq!(saved(&["lm_head"]), Ok(vec!["lm_head".into()]));
        assert!(saved(&["nowhere"]).expect_err("no such module").contains("no module"));
    }

    #[test]
    fn a_tensor_trains_with_its_module() {
        let trained = TrainedModules::resolve(&[r"mlp\.0".into()], &modules(), None).expect("it is there");
        assert!(trained.trains("model.visual.merger.mlp.0.bias"));
        assert!(!trained.trains("model.visual.merger.ln_q.weight") && !trained.is_empty());
    }
}
