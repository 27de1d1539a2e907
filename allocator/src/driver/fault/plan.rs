//! A plan of faults: what happens, where, and at which occurrence.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::super::Step;
use super::call::{DriverCall, Point};
use crate::{Error, Result};

/// Fault of a rank at a point of its plan. Every fault happens before the inner driver is called.
#[derive(Clone)]
pub enum FaultAction {
    /// The call returns this error; the inner driver is not called.
    Fail(Error),
    /// The call takes this much longer; a call with a deadline times out if that is too long.
    Delay(Duration),
    /// The process dies by `SIGKILL`, as by the out-of-memory killer: nothing is cleaned up.
    Kill,
    /// The thread stops for ever; a call with a deadline times out then.
    Hang,
    /// A closure of the test runs on the calling thread.
    Notify(Arc<dyn Fn() + Send + Sync>),
}

impl fmt::Debug for FaultAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fail(error) => write!(f, "Fail({error})"),
            Self::Delay(by) => write!(f, "Delay({by:?})"),
            Self::Kill => f.write_str("Kill"),
            Self::Hang => f.write_str("Hang"),
            Self::Notify(_) => f.write_str("Notify"),
        }
    }
}

#[derive(Clone, Debug)]
struct Rule {
    point: Point,
    /// From 1; 0 is every occurrence.
    nth: u64,
    action: FaultAction,
}

/// A list of faults; those of one occurrence happen in the order in which they were added, up to
/// the first that fails.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    rules: Vec<Rule>,
}

impl FaultPlan {
    /// No faults: only counting.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a fault at the `nth` such call, counted from 1; 0 means every one.
    #[must_use]
    pub fn at_call(self, call: DriverCall, nth: u64, action: FaultAction) -> Self {
        self.at(Point::Call(call), nth, action)
    }

    /// Adds a fault when the step is reached for the `nth` time, counted from 1; 0 means every
    /// time.
    #[must_use]
    pub fn at_step(self, step: Step, nth: u64, action: FaultAction) -> Self {
        self.at(Point::Step(step), nth, action)
    }

    fn at(mut self, point: Point, nth: u64, action: FaultAction) -> Self {
        self.rules.push(Rule { point, nth, action });
        self
    }

    /// Reads a plan as it is given in the environment or on a command line: faults separated by
    /// commas, each `action@point` or `action@point:nth`.
    ///
    /// - action: `kill`, `hang`, `delay-500ms` (`us`, `ms` or `s`), `fail` (a failed system call),
    ///   `fail-oom`, `fail-unsupported`, `fail-refused`, `fail-timeout`
    /// - point: a call, such as `create`, `map`, `record-event`, or a step, such as
    ///   `step:commit-map`
    /// - nth: from 1, the default; `*` for every one
    ///
    /// ```text
    /// kill@step:commit-map
    /// fail-oom@create:3,delay-500ms@map:*
    /// ```
    pub fn parse(text: &str) -> Result<Self> {
        text.split(',').try_fold(Self::new(), |plan, fault| {
            let fault = fault.trim();
            let nonsense = |what: String| {
                Error::invalid_argument(format!("fault {fault:?}: {what}; see FaultPlan::parse"))
            };
            let (action, place) = fault
                .split_once('@')
                .ok_or_else(|| nonsense("expected action@point or action@point:nth".into()))?;
            let (point, nth) = read_place(place).map_err(nonsense)?;
            let action = read_action(action, point).map_err(nonsense)?;
            if point == Point::Call(DriverCall::ReleaseEvent)
                && matches!(action, FaultAction::Fail(_))
            {
                return Err(nonsense("releasing an event cannot fail".into()));
            }
            Ok(plan.at(point, nth, action))
        })
    }

    /// Faults that are planned for this occurrence of a point.
    pub(super) fn actions(&self, point: Point, nth: u64) -> impl Iterator<Item = &FaultAction> {
        self.rules
            .iter()
            .filter(move |rule| rule.point == point && (rule.nth == 0 || rule.nth == nth))
            .map(|rule| &rule.action)
    }
}

impl std::str::FromStr for FaultPlan {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
}

fn read_place(text: &str) -> Result<(Point, u64), String> {
    let find = |name: &str| Point::all().find(|point| point.to_string() == name);
    if let Some(point) = find(text) {
        return Ok((point, 1));
    }
    let found = text.rsplit_once(':').and_then(|(name, nth)| Some((find(name)?, nth)));
    let Some((point, nth)) = found else {
        let names: Vec<String> = Point::all().map(|point| point.to_string()).collect();
        return Err(format!("no point {text:?}; expected one of {}", names.join(", ")));
    };
    match nth {
        "*" => Ok((point, 0)),
        _ => match nth.parse() {
            Ok(0) | Err(_) => Err(format!("occurrence {nth:?}; expected a number from 1, or *")),
            Ok(nth) => Ok((point, nth)),
        },
    }
}

fn read_action(text: &str, point: Point) -> Result<FaultAction, String> {
    let planned = format!("a planned fault at {point}");
    Ok(match text {
        "kill" => FaultAction::Kill,
        "hang" => FaultAction::Hang,
        "fail" => FaultAction::Fail(Error::system(planned, "it was asked for")),
        "fail-oom" => FaultAction::Fail(Error::out_of_memory(planned)),
        "fail-unsupported" => FaultAction::Fail(Error::unsupported(planned)),
        "fail-refused" => FaultAction::Fail(Error::refused(planned)),
        "fail-timeout" => {
            FaultAction::Fail(Error::timeout(format!("in {planned}"), Duration::ZERO, Vec::new()))
        }
        _ => FaultAction::Delay(text.strip_prefix("delay-").and_then(read_duration).ok_or_else(
            || {
                format!(
                    "no action {text:?}; expected kill, hang, fail, fail-oom, fail-unsupported, \
                     fail-refused, fail-timeout or a delay such as delay-500ms"
                )
            },
        )?),
    })
}

fn read_duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(digits);
    let number = number.parse().ok()?;
    match unit {
        "us" => Some(Duration::from_micros(number)),
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        _ => None,
    }
}
