//! The launchers that describe a process's group in its environment, and which of them did.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Group, Result, short};

/// Reads an environment variable.
pub(super) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Variable that names the launcher to believe, by its [`Launcher::key`].
const CHOICE: &str = "SYMMPOOL_LAUNCHER";

/// Variable that torchrun alone sets for the processes that it starts.
const TORCHRUN: &str = "TORCHELASTIC_RUN_ID";

/// Variables that srun sets for tasks. A batch script has a rank and a world, and none of these.
const STEP: [&str; 3] = ["SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"];

/// The variables of a launcher.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Launcher {
    /// Name in messages.
    pub(super) name: &'static str,
    /// Name as a value of `SYMMPOOL_LAUNCHER`.
    pub(super) key: &'static str,
    pub(super) rank: &'static str,
    pub(super) world: &'static str,
    pub(super) local_rank: Option<&'static str>,
    /// Sign that all ranks are on one machine.
    pub(super) one_machine: OneMachine,
    /// Where rank 0 is, by the first of these that is set.
    pub(super) leader: &'static [Leader],
    /// Variables that are equal on all ranks and different in another job: the store's port is made of them.
    pub(super) job: &'static [&'static str],
    /// The store's port where each rank has a network of its own.
    pub(super) port: Option<u16>,
    /// Whether this starts all processes itself, in whatever the launchers behind it have started.
    starts_all: bool,
}

/// Sign that all ranks of a launcher are on one machine.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OneMachine {
    /// Nothing does.
    Unknown,
    /// A variable with the number of ranks on this machine, if that is all of them.
    Ranks(&'static str),
    /// A variable with the number of machines, if that is one.
    Machines(&'static str),
}

/// A variable that says where rank 0 is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Leader {
    Address(&'static str),
    /// A list of machines in Slurm's form, of which the first has rank 0.
    FirstOf(&'static str),
}

const NO_LAUNCHER: Launcher = Launcher {
    name: "",
    key: "",
    rank: "",
    world: "",
    local_rank: None,
    one_machine: OneMachine::Unknown,
    leader: &[],
    job: &[],
    port: None,
    starts_all: false,
};

/// All launchers. One may run inside another one that stands behind it here: torchrun in a job of Slurm, say.
pub(super) const LAUNCHERS: [Launcher; 7] = [
    // torchrun, Ray Train, Kubeflow's PyTorchJob, and scripts. torchrun's agents may be anyone's processes.
    Launcher {
        name: "RANK and WORLD_SIZE",
        key: "env",
        rank: "RANK",
        world: "WORLD_SIZE",
        local_rank: Some("LOCAL_RANK"),
        one_machine: OneMachine::Ranks("LOCAL_WORLD_SIZE"),
        ..NO_LAUNCHER
    },
    Launcher {
        name: "Open MPI's mpirun",
        key: "openmpi",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: Some("OMPI_COMM_WORLD_LOCAL_RANK"),
        one_machine: OneMachine::Ranks("OMPI_COMM_WORLD_LOCAL_SIZE"),
        job: &["PMIX_NAMESPACE"],
        starts_all: true,
        ..NO_LAUNCHER
    },
    Launcher {
        name: "the mpirun of MPICH or Intel MPI",
        key: "mpich",
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: Some("MPI_LOCALRANKID"),
        one_machine: OneMachine::Ranks("MPI_LOCALNRANKS"),
        starts_all: true,
        ..NO_LAUNCHER
    },
    Launcher {
        name: "Slurm's srun",
        key: "slurm",
        rank: "SLURM_PROCID",
        world: "SLURM_NTASKS",
        local_rank: Some("SLURM_LOCALID"),
        one_machine: OneMachine::Machines("SLURM_STEP_NUM_NODES"),
        leader: &[
            Leader::FirstOf("SLURM_STEP_NODELIST"),
            Leader::Address("SLURM_LAUNCH_NODE_IPADDR"),
        ],
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
        ..NO_LAUNCHER
    },
    Launcher {
        name: "Kubernetes' LeaderWorkerSet",
        key: "lws",
        rank: "LWS_WORKER_INDEX",
        world: "LWS_GROUP_SIZE",
        leader: &[Leader::Address("LWS_LEADER_ADDRESS")],
        port: Some(29_500),
        ..NO_LAUNCHER
    },
    Launcher {
        name: "PMIx",
        key: "pmix",
        rank: "PMIX_RANK",
        world: "WORLD_SIZE",
        job: &["PMIX_NAMESPACE"],
        ..NO_LAUNCHER
    },
    Launcher {
        name: "Kubernetes' indexed job",
        key: "kubernetes",
        rank: "JOB_COMPLETION_INDEX",
        world: "WORLD_SIZE",
        port: Some(29_500),
        ..NO_LAUNCHER
    },
];

/// A launcher that described this process, and what it says.
#[derive(Debug)]
pub(super) struct Recognised {
    pub(super) launcher: &'static Launcher,
    pub(super) rank: u32,
    pub(super) world: u32,
    /// Launchers that say the same of this process, and may know more: where rank 0 is, say.
    pub(super) agreeing: Vec<&'static Launcher>,
}

impl Recognised {
    /// The launcher itself, and those that say the same.
    pub(super) fn all(&self) -> impl Iterator<Item = &'static Launcher> {
        std::iter::once(self.launcher).chain(self.agreeing.iter().copied())
    }

    /// The launcher's name in messages.
    pub(super) fn name(&self, lookup: Lookup<'_>) -> &'static str {
        if self.launcher.key == "env" && lookup(TORCHRUN).is_some() {
            "torchrun"
        } else {
            self.launcher.name
        }
    }
}

impl Launcher {
    /// Whether its world is in a variable of another launcher, the first one.
    fn borrows_world(&self) -> bool {
        self.key != LAUNCHERS[0].key && self.world == LAUNCHERS[0].world
    }

    /// Whether its rank or its world is set. A variable of another launcher says nothing of this one.
    fn is_sign(&self, lookup: Lookup<'_>) -> bool {
        lookup(self.rank).is_some() || (!self.borrows_world() && lookup(self.world).is_some())
    }

    fn is_complete(&self, lookup: Lookup<'_>) -> bool {
        lookup(self.rank).is_some() && lookup(self.world).is_some()
    }

    /// Rank and world that it says, as far as they make sense.
    fn says(&self, lookup: Lookup<'_>) -> (Option<u32>, Option<u32>) {
        let number = |name: &str| lookup(name)?.trim().parse().ok();
        (number(self.rank), number(self.world))
    }

    /// Its variables that are set, with their values.
    fn shown(&self, lookup: Lookup<'_>) -> String {
        let one = |name: &str| Some(format!("{name}={}", short(&lookup(name)?)));
        [one(self.rank), one(self.world)].into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// The launcher that described this process; `None` where none of their variables is set.
///
/// It is the first one of the table whose rank and world are both set. Where none has both, one that has only one of
/// them is an error, and so is one that contradicts the first one without having started its launcher.
pub(super) fn recognise(lookup: Lookup<'_>) -> Result<Option<Recognised>> {
    let env_is_complete = LAUNCHERS[0].is_complete(lookup);
    let counts = |launcher: &&'static Launcher| {
        launcher.is_sign(lookup) && !(launcher.borrows_world() && env_is_complete)
    };
    let chosen = chosen(lookup)?;
    let signs: Vec<&'static Launcher> = LAUNCHERS.iter().filter(counts).collect();
    let complete = || signs.iter().copied().find(|launcher| launcher.is_complete(lookup));
    let Some(launcher) = chosen.or_else(complete) else {
        return match signs.first() {
            Some(half) => Err(half_complete(half, lookup)),
            None => Ok(None),
        };
    };
    if !launcher.is_complete(lookup) {
        return Err(half_complete(launcher, lookup));
    }
    let (rank, world) = numbers(launcher, lookup)?;
    if launcher.key == "slurm" && world > 1 && STEP.iter().all(|name| lookup(name).is_none()) {
        return Err(Error::invalid_argument(format!(
            "{} count tasks of a batch script, which starts none of them ({} is not set): start the program by srun",
            launcher.shown(lookup),
            STEP[0]
        )));
    }
    let mut agreeing = Vec::new();
    for other in signs.into_iter().filter(|other| other.key != launcher.key) {
        let (their_rank, their_world) = other.says(lookup);
        let agrees = their_rank.is_none_or(|their| their == rank)
            && their_world.is_none_or(|their| their == world);
        if agrees && other.is_complete(lookup) {
            agreeing.push(other);
        } else if !agrees
            && chosen.is_none()
            && !is_inside((launcher, world), (other, their_world), lookup)
        {
            return Err(disagree(launcher, other, lookup));
        }
    }
    Ok(Some(Recognised { launcher, rank, world, agreeing }))
}

/// Whether `launcher` started this process in a process of `other`, which then counts other processes.
fn is_inside(
    (launcher, world): (&Launcher, u32),
    (other, their_world): (&Launcher, Option<u32>),
    lookup: Lookup<'_>,
) -> bool {
    let place = |of: &Launcher| LAUNCHERS.iter().position(|each| each.key == of.key);
    let is_behind = place(launcher) < place(other);
    let starts_all = launcher.starts_all || (launcher.key == "env" && lookup(TORCHRUN).is_some());
    is_behind && (starts_all || their_world.is_some_and(|their| their < world))
}

fn chosen(lookup: Lookup<'_>) -> Result<Option<&'static Launcher>> {
    let Some(name) = lookup(CHOICE).filter(|name| !name.is_empty()) else { return Ok(None) };
    let found = LAUNCHERS.iter().find(|launcher| launcher.key == name);
    found.map(Some).ok_or_else(|| {
        let keys: Vec<&str> = LAUNCHERS.iter().map(|launcher| launcher.key).collect();
        Error::invalid_argument(format!(
            "environment variable {CHOICE}={:?}: expected one of {}",
            short(&name),
            keys.join(", ")
        ))
    })
}

fn half_complete(launcher: &Launcher, lookup: Lookup<'_>) -> Error {
    let Launcher { name, rank, world, .. } = launcher;
    let missing = if lookup(rank).is_none() { rank } else { world };
    let there = launcher.shown(lookup);
    let there = if there.is_empty() { String::new() } else { format!(", but {there} is") };
    let advice = match launcher.key {
        "slurm" => "start the program by srun, which sets both",
        "pmix" | "kubernetes" => "set it to the number of ranks, for all of them",
        _ => "torchrun and similar launchers set both; otherwise set it, too",
    };
    Error::invalid_argument(format!(
        "environment variable {missing} is not set{there} ({name}): {advice}"
    ))
}

fn disagree(launcher: &Launcher, other: &Launcher, lookup: Lookup<'_>) -> Error {
    Error::invalid_argument(format!(
        "the environment describes two different groups: {} ({}) and {} ({}); unset the variables that do not belong \
         to this run, or choose with {CHOICE}={} or {CHOICE}={}",
        launcher.shown(lookup),
        launcher.name,
        other.shown(lookup),
        other.name,
        launcher.key,
        other.key
    ))
}

fn numbers(launcher: &Launcher, lookup: Lookup<'_>) -> Result<(u32, u32)> {
    let needed = |name, what| {
        let found = optional(lookup, name, what)?;
        found.ok_or_else(|| wrong(name, &" (not set)", what))
    };
    let world: u32 = needed(launcher.world, "a number of ranks")?;
    let rank: u32 = needed(launcher.rank, "a rank")?;
    if world == 0 || world > Group::MAX_WORLD {
        return Err(wrong(launcher.world, &world, &format!("1 to {}", Group::MAX_WORLD)));
    }
    if rank >= world {
        return Err(wrong(
            launcher.rank,
            &rank,
            &format!("a rank below {}={world}", launcher.world),
        ));
    }
    Ok((rank, world))
}

/// The error of a variable with a wrong value.
pub(super) fn wrong(name: &str, value: &dyn fmt::Display, expected: &str) -> Error {
    Error::invalid_argument(format!(
        "environment variable {name}={value}: expected {expected}; torchrun and similar launchers \
         set it"
    ))
}

/// The value of a variable, if it is set.
pub(super) fn optional<T: FromStr>(
    lookup: Lookup<'_>,
    name: &str,
    expected: &str,
) -> Result<Option<T>> {
    let Some(value) = lookup(name) else { return Ok(None) };
    let trimmed = value.trim();
    match trimmed.parse() {
        Ok(parsed) if !trimmed.is_empty() => Ok(Some(parsed)),
        _ => Err(wrong(name, &format!("{:?}", short(&value)), expected)),
    }
}

/// The first machine of a list in Slurm's form: `node007` of `node[007-012,20],login1`.
pub(super) fn first_machine(list: &str) -> Option<String> {
    let mut first = String::new();
    let mut rest = list.trim();
    while let Some(next) = rest.chars().next() {
        match next {
            ',' => break,
            '[' => {
                let (inside, behind) = rest[1..].split_once(']')?;
                let number = inside.split([',', '-']).next().filter(|number| !number.is_empty())?;
                first.push_str(number);
                rest = behind;
            }
            ']' => return None,
            _ => {
                first.push(next);
                rest = &rest[next.len_utf8()..];
            }
        }
    }
    let is_name = !first.is_empty() && !first.contains(|c: char| c.is_whitespace() || c == '[');
    is_name.then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_machine_of_a_list_has_rank_0() {
        for (list, first) in [
            ("node7", "node7"),
            ("node[007-012,20],login1", "node007"),
            ("gnode[10,20,25,37]", "gnode10"),
            ("a,b[1-2]", "a"),
            ("rack[1-2]n[01-16]", "rack1n01"),
            ("n[3]-ib.example.org,n4", "n3-ib.example.org"),
            (" node1 ", "node1"),
            ("10.0.0.7,10.0.0.8", "10.0.0.7"),
        ] {
            assert_eq!(first_machine(list).as_deref(), Some(first), "{list}");
        }
        for wrong in ["", " ", ",a", "n[", "n[]", "n[,1]", "n]", "n[-3]", "a b", "n[1 2]", "n[[1]]"]
        {
            assert_eq!(first_machine(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn keys_and_variables_are_unique() {
        let mut keys: Vec<_> = LAUNCHERS.iter().map(|launcher| launcher.key).collect();
        let mut ranks: Vec<_> = LAUNCHERS.iter().map(|launcher| launcher.rank).collect();
        for names in [&mut keys, &mut ranks] {
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), LAUNCHERS.len(), "{names:?}");
        }
    }
}
