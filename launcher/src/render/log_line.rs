//! A line of the coordinator's log, taken apart: `14:03:45  step      1/400  epoch 0  loss 0.81230  ...`.
//!
//! The log is written for people, possibly by another version, and its last line may be cut in half: what
//! cannot be read in it is left out.

use serde_json::Value;

/// Time, tag and sentence of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogLine<'a> {
    /// `14:03:45`.
    pub time: &'a str,
    /// `step`, `workers`, `fail`, ...
    pub tag: &'a str,
    /// What is told.
    pub text: &'a str,
}

/// What a step's line says, as far as it does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepLine {
    /// Steps committed with this one.
    pub committed: u64,
    /// Steps in all.
    pub total: u64,
    /// Which epoch.
    pub epoch: u64,
    /// Absent if the step was left out.
    pub loss: Option<f64>,
    /// Norm of the gradient.
    pub grad_norm: f64,
    /// The highest of all groups.
    pub learning_rate: f64,
    /// Over all ranks.
    pub samples_per_second: f64,
    /// Over all ranks.
    pub tokens_per_second: f64,
}

impl<'a> LogLine<'a> {
    /// None if it is not of this form: a panic's text, a line of JSON, the half of a line.
    pub fn parse(line: &'a str) -> Option<Self> {
        const TIME: usize = "14:03:45".len();
        let (time, rest) = line.split_at_checked(TIME)?;
        let is_time = time.bytes().enumerate().all(|(at, byte)| match at {
            2 | 5 => byte == b':',
            _ => byte.is_ascii_digit(),
        });
        let (tag, text) = rest.strip_prefix("  ")?.split_once(' ')?;
        is_time.then_some(Self { time, tag, text: text.trim_start() })
    }

    /// Whether something is wrong.
    pub fn warns(&self) -> bool {
        let words = ["warning", "error"];
        words.contains(&self.tag) || words.iter().any(|word| self.text.starts_with(&format!("{word}: ")))
    }

    /// The step that it tells.
    pub fn step(&self) -> Option<StepLine> {
        let text = self.text.strip_prefix("warning: ").unwrap_or(self.text);
        let (count, rest) = text.split_once("  ").filter(|_| self.tag == "step")?;
        let (committed, total) = count.split_once('/')?;
        let mut step = StepLine {
            committed: committed.parse().ok()?,
            total: total.parse().ok()?,
            ..StepLine::default()
        };
        for column in rest.split("  ").map(str::trim) {
            let Some((first, second)) = column.split_once(' ') else { continue };
            match (first, second) {
                ("epoch", number) => step.epoch = number.parse().unwrap_or_default(),
                ("loss", number) => step.loss = number.parse().ok(),
                ("grad", number) => step.grad_norm = number.parse().unwrap_or_default(),
                ("lr", number) => step.learning_rate = number.parse().unwrap_or_default(),
                (number, "samples/s") => step.samples_per_second = counted(number),
                (number, "tokens/s") => step.tokens_per_second = counted(number),
                _ => {}
            }
        }
        Some(step)
    }
}

/// The steps committed with the one that a line of the log tells, as text or as JSON, and how many there are
/// in all.
pub fn committed(line: &str) -> Option<(u64, u64)> {
    if line.starts_with('{') {
        let record: Value = serde_json::from_str(line).ok()?;
        let is_step = record["target"] == "coxswain::step";
        return Some((record["committed"].as_u64()?, record["total"].as_u64()?)).filter(|_| is_step);
    }
    let step = LogLine::parse(line)?.step()?;
    step.loss.map(|_| (step.committed, step.total))
}

/// `12.3k` as [`coxswain_proto::human::count`] writes it.
fn counted(text: &str) -> f64 {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'k') => (&text[..text.len() - 1], 1e3),
        Some(b'M') => (&text[..text.len() - 1], 1e6),
        _ => (text, 1.0),
    };
    digits.parse::<f64>().map_or(0.0, |number| number * unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: &str = "17:15:17  step    10/12  epoch 2  loss 1.8115    grad 4.5836    lr 1.00e-4   16.7 samples/s  \
                        12.3k tokens/s    480 ms (ms: vision 120, language 4.2)   512.0 MiB on rank 1";

    #[test]
    fn a_steps_line_gives_its_figures_back() {
        let line = LogLine::parse(STEP).unwrap();
        assert_eq!((line.time, line.tag, line.warns()), ("17:15:17", "step", false));
        let expected = StepLine {
            committed: 10,
            total: 12,
            epoch: 2,
            loss: Some(1.8115),
            grad_norm: 4.5836,
            learning_rate: 1e-4,
            samples_per_second: 16.7,
            tokens_per_second: 12.3e3,
        };
        assert_eq!(line.step(), Some(expected));
        assert_eq!(committed(STEP), Some((10, 12)));
        let json = r#"{"level":"INFO","target":"coxswain::step","step":9,"committed":10,"total":12}"#;
        assert_eq!(committed(json), Some((10, 12)));
        assert_eq!(committed(&json.replace("step\"", "save\"")), None);
    }

    #[test]
    fn a_step_that_was_left_out_has_no_loss_and_is_a_warning() {
        let line = "17:15:17  step    warning: 3/12  epoch 0  left out: its loss was not finite in either of two attempts";
        let parsed = LogLine::parse(line).unwrap();
        assert!(parsed.warns());
        assert_eq!(parsed.step().map(|step| (step.committed, step.loss)), Some((3, None)));
        assert_eq!(committed(line), None, "it is shown whatever is held back");
    }

    #[test]
    fn every_half_of_a_line_and_foreign_lines_are_taken_for_what_they_are() {
        for end in 0..STEP.len() {
            let _ = LogLine::parse(&STEP[..end]).and_then(|line| line.step());
        }
        for foreign in
            ["", "thread 'main' panicked at x.rs:1:1:", "{\"level\":\"INFO\"", "äöüäöüäöü  step 1/2"]
        {
            assert_eq!(LogLine::parse(foreign).and_then(|line| line.step()), None, "{foreign}");
        }
        let lost = LogLine::parse("17:15:17  fail    warning: lost: rank 1").unwrap();
        assert!(lost.warns() && lost.step().is_none());
        assert!(LogLine::parse("17:15:17  warning odd count=2").unwrap().warns());
    }
}
