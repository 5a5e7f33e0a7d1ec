//! What a token grants.

use std::{fmt, str::FromStr};

/// What a token, or a certificate's name, grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Look: status, ledger, history, memory, metrics, reflection.
    Read,
    /// Look and steer: pause, resume, checkpoint, drain, stop, rebuild the kept features.
    Control,
    /// Look and take part: launchers and workers, and the ring between these.
    Worker,
    /// All of it.
    All,
}

impl Scope {
    /// Every scope, the smallest first.
    pub const EACH: [Self; 4] = [Self::Read, Self::Control, Self::Worker, Self::All];

    /// Whether who has this may do what wants `wanted`.
    pub fn grants(self, wanted: Self) -> bool {
        self == wanted || self == Self::All || wanted == Self::Read
    }

    /// Name, in files and flags.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Control => "control",
            Self::Worker => "worker",
            Self::All => "all",
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Scope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::EACH.into_iter().find(|scope| scope.name() == text);
        found.ok_or_else(|| format!("{text}: expected read, control, worker or all"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_grants_itself_and_a_look() {
        use Scope::*;
        let granted = Scope::EACH.map(|has| Scope::EACH.map(|wants| has.grants(wants)));
        let [read, control, worker, all] = granted;
        assert_eq!(read, [true, false, false, false]);
        assert_eq!(control, [true, true, false, false]);
        assert_eq!(worker, [true, false, true, false]);
        assert_eq!(all, [true; 4]);
        assert_eq!("worker".parse(), Ok(Worker));
        assert!(Scope::from_str("root").unwrap_err().contains("expected read, control"));
        assert_eq!([Read, Control, Worker, All].map(Scope::name), ["read", "control", "worker", "all"]);
    }
}
