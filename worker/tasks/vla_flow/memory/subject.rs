//! The prediction as the engine and `cox plan` see it.

use coxswain_nn::{dtypes::ActivationsDtype, params::TrainableLayout};
use coxswain_proto::{
    human,
    run_spec::{Recompute, RunSpec},
};
use coxswain_task::{
    TaskError,
    memory::{self, Ask, Prediction, Suggestion},
};
use serde_json::{Value, json};

use super::Subject;
use crate::vla_flow::{config::HeadKind, data::PromptLength};

impl memory::Subject for Subject {
    fn spec(&self) -> &RunSpec {
        &self.spec
    }

    fn layout(&self) -> &TrainableLayout {
        &self.trained
    }

    fn model(&self) -> String {
        self.model.sizes.clone()
    }

    fn predict(&self, ask: Ask) -> Prediction {
        Self::predict(self, ask)
    }

    fn beside_gpu(&self, ask: Ask) -> u64 {
        Self::beside_gpu(self, ask)
    }

    fn reserved(&self, ask: Ask, gpu: u64) -> Option<u64> {
        Some(Self::reserved(self, ask, gpu))
    }

    fn suggestions(&self, ask: Ask) -> Vec<Suggestion> {
        Self::suggestions(self, ask)
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let (counts, outline, vla) = (&self.counts, &self.outline, &self.vla);
        let trainable = self.trained.len() as u64;
        let frozen = counts.pretrained() - counts.base + counts.frozen_expert;
        let share = 100.0 * trainable as f64 / (frozen + trainable).max(1) as f64;
        let dtype = vla.model.weights_dtype.name();
        let base = match counts.base {
            0 => String::new(),
            base => format!("base {}, ", human::grouped(base)),
        };
        let expert = match (counts.frozen_expert, counts.expert) {
            (0, trained) => human::grouped(trained),
            (frozen, 0) => format!("none of {}", human::grouped(frozen)),
            (frozen, trained) => {
                format!("{} with {} frozen", human::grouped(trained), human::grouped(frozen))
            }
        };
        let estimated = match outline.prompt_length {
            PromptLength::Encoded => "",
            PromptLength::Estimated => " (estimated)",
        };
        let draws = match vla.expert.head {
            HeadKind::Flow | HeadKind::Layerwise => format!("{} draws of ", vla.expert.repeated_noise),
            HeadKind::Oft => String::new(),
        };
        vec![
            (
                "model",
                format!(
                    "{} parameters frozen in {dtype}, {} trained in float32 ({share:.2} %)",
                    human::grouped(frozen),
                    human::grouped(trainable)
                ),
            ),
            (
                "trains",
                format!(
                    "lora {}, {base}expert {}, sensor {}",
                    human::grouped(counts.lora),
                    expert,
                    human::grouped(counts.sensor)
                ),
            ),
            (
                "sample",
                format!(
                    "{} prompt tokens{estimated}, {} image patches, {draws}{} actions (the longest)",
                    outline.prompt_tokens, outline.patches, outline.dims.horizon
                ),
            ),
        ]
    }

    fn precision(&self) -> Option<&'static str> {
        match (self.vla.model.activations_dtype, self.spec.train.recompute) {
            (ActivationsDtype::Float32, _) => None,
            (ActivationsDtype::Bfloat16, Recompute::None) => Some("activations rounded to bfloat16"),
            (ActivationsDtype::Bfloat16, _) => Some("activations kept in bfloat16"),
        }
    }

    fn epoch_len(&self) -> Option<u64> {
        self.outline.epoch
    }

    fn to_json(&self) -> Value {
        let (counts, outline) = (&self.counts, &self.outline);
        json!({
            "parameters": {
                "pretrained": counts.pretrained(),
                "trainable": self.trained.len(),
                "lora": counts.lora,
                "base": counts.base,
                "expert": counts.expert,
                "frozen_expert": counts.frozen_expert,
                "sensor": counts.sensor,
            },
            "sample": {
                "prompt_tokens": outline.prompt_tokens,
                "estimated": outline.prompt_length == PromptLength::Estimated,
                "patches": outline.patches,
            },
        })
    }

    fn changed(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Box<dyn memory::Subject>, TaskError> {
        let changed = Self::changed(self, change).map_err(TaskError::bad_input)?;
        changed.try_pass().map_err(TaskError::bad_input)?;
        Ok(Box::new(changed))
    }
}
