//! Environments of launchers, right ones and wrong ones.

use super::*;

type Variables = [(&'static str, &'static str)];

const TORCHRUN: [(&str, &str); 5] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29500"),
];

/// Variables of Open MPI 4.1 on one machine.
const OPEN_MPI: [(&str, &str); 6] = [
    ("OMPI_COMM_WORLD_RANK", "2"),
    ("OMPI_COMM_WORLD_SIZE", "3"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
    ("PMIX_RANK", "2"),
    ("PMIX_NAMESPACE", "891027457"),
];

/// Variables of MPICH 5 on one machine.
const MPICH: [(&str, &str); 4] =
    [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];

const SLURM: [(&str, &str); 8] = [
    ("SLURM_PROCID", "5"),
    ("SLURM_NTASKS", "16"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_STEP_NUM_NODES", "4"),
    ("SLURM_STEP_NODELIST", "node[07-09,12]"),
    ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"),
    ("SLURM_JOB_ID", "200505"),
    ("SLURM_STEP_ID", "0"),
];

const LWS: [(&str, &str); 3] = [
    ("LWS_WORKER_INDEX", "1"),
    ("LWS_GROUP_SIZE", "4"),
    ("LWS_LEADER_ADDRESS", "llm-0.llm.default"),
];

/// Some variables, some of them changed or added (`None`: removed).
fn with(all: &[&Variables], changes: &[(&str, Option<&str>)]) -> Result<Option<Launch>> {
    Launch::from_lookup(&|name| match changes.iter().find(|(changed, _)| *changed == name) {
        Some((_, value)) => value.map(str::to_owned),
        None => {
            all.iter().copied().flatten().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
        }
    })
}

fn launch(all: &[&Variables], changes: &[(&str, Option<&str>)]) -> Launch {
    with(all, changes).unwrap().expect("a launcher")
}

fn torchrun(changes: &[(&str, Option<&str>)]) -> Result<Launch> {
    with(&[&TORCHRUN], changes).map(|launch| launch.expect("a launcher"))
}

/// Text of the error, which has all of `parts`.
fn refused(all: &[&Variables], changes: &[(&str, Option<&str>)], parts: &[&str]) {
    let error = with(all, changes).unwrap_err();
    assert!(error.is_invalid_argument(), "{error}");
    let text = error.to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "{parts:?}: {text}");
}

#[test]
fn every_launcher_is_recognised_by_its_variables() {
    let kubernetes: &Variables =
        &[("JOB_COMPLETION_INDEX", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "job-0.svc")];
    let pmix: &Variables = &[
        ("PMIX_RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node0"),
        ("PMIX_NAMESPACE", "prterun-node0-77@1"),
    ];
    // Without a port the job's number is made into one.
    for (variables, name, numbers, address_of_store) in [
        (&TORCHRUN[..], "RANK and WORLD_SIZE", (3, 8, Some(1)), "node0:29500"),
        (&OPEN_MPI, "Open MPI's mpirun", (2, 3, Some(2)), "127.0.0.1"),
        (&SLURM, "Slurm's srun", (5, 16, Some(1)), "node07"),
        (&LWS, "Kubernetes' LeaderWorkerSet", (1, 4, None), "llm-0.llm.default:29500"),
        (kubernetes, "Kubernetes' indexed job", (1, 2, None), "job-0.svc:29500"),
        (pmix, "PMIx", (1, 2, None), "node0"),
    ] {
        let found = launch(&[variables], &[]);
        assert_eq!((found.rank(), found.world(), found.local_rank()), numbers, "{found:?}");
        assert_eq!(found.launcher(), name);
        if address_of_store.contains(':') {
            assert_eq!(found.store_address(), address_of_store);
        } else {
            let StoreAddress::Tcp(address, port) = &found.store else { panic!("{found:?}") };
            assert!(
                address == address_of_store && JOB_PORTS.contains(&u64::from(*port)),
                "{found:?}"
            );
        }
    }
    let found = launch(&[&MPICH], &[("MASTER_PORT", Some("7000"))]);
    assert_eq!((found.rank(), found.world(), found.local_rank()), (1, 2, Some(1)));
    assert_eq!(
        (found.launcher(), found.store_address().as_str()),
        ("the mpirun of MPICH or Intel MPI", "127.0.0.1:7000")
    );
    assert_eq!(with(&[], &[]).unwrap(), None);
    assert_eq!(
        with(&[], &[("MASTER_ADDR", Some("node0")), ("LOCAL_RANK", Some("1"))]).unwrap(),
        None
    );
    let name = launch(&[&TORCHRUN], &[("TORCHELASTIC_RUN_ID", Some("none"))]).launcher;
    assert_eq!(name, "torchrun");
}

#[test]
fn ports_of_jobs_differ_between_jobs_and_steps_and_not_between_ranks() {
    let port = |changes: &[(&str, Option<&str>)]| launch(&[&SLURM], changes).store_address();
    let here = port(&[]);
    assert_eq!(here, port(&[("SLURM_PROCID", Some("0")), ("SLURM_LOCALID", Some("0"))]));
    assert_ne!(here, port(&[("SLURM_JOB_ID", Some("200506"))]));
    assert_ne!(here, port(&[("SLURM_STEP_ID", Some("1"))]));
    assert_eq!(port(&[("MASTER_PORT", Some("7000"))]), "node07:7000");
    assert_eq!(
        port(&[("SYMMPOOL_PORT", Some("7001")), ("MASTER_PORT", Some("7000"))]),
        "node07:7001"
    );
    refused(&[&SLURM], &[("SLURM_JOB_ID", None)], &["MASTER_PORT is not set", "Slurm's srun"]);
    refused(&[&MPICH], &[], &["MASTER_PORT is not set", "MPICH", "free port of rank 0's machine"]);
}

#[test]
fn the_address_is_the_users_or_where_the_launcher_has_rank_0() {
    let address = |all: &Variables, changes: &[(&str, Option<&str>)]| {
        launch(&[all], changes).store_address().rsplit_once(':').unwrap().0.to_owned()
    };
    assert_eq!(address(&SLURM, &[("MASTER_ADDR", Some("ib0"))]), "ib0");
    assert_eq!(address(&SLURM, &[("SLURM_STEP_NODELIST", None)]), "10.0.0.1");
    assert_eq!(address(&SLURM, &[("SLURM_STEP_NUM_NODES", Some("1"))]), "127.0.0.1");
    refused(
        &[&SLURM],
        &[("SLURM_STEP_NODELIST", Some("n["))],
        &["SLURM_STEP_NODELIST=\"n[\"", "list of machines"],
    );
    let none = [("SLURM_STEP_NODELIST", None), ("SLURM_LAUNCH_NODE_IPADDR", None)];
    refused(
        &[&SLURM],
        &none,
        &[
            "MASTER_ADDR is not set",
            "start the program by srun, or",
            "SYMMPOOL_STORE=file:///DIRECTORY",
        ],
    );
    // On several machines mpirun does not say where rank 0 is.
    let two = ("OMPI_COMM_WORLD_LOCAL_SIZE", Some("2"));
    refused(
        &[&OPEN_MPI],
        &[two],
        &["MASTER_ADDR is not set", "Open MPI's mpirun does not say", "-x NAME"],
    );
    assert_eq!(address(&OPEN_MPI, &[two, ("MASTER_ADDR", Some("node0"))]), "node0");
    refused(&[&OPEN_MPI], &[("MASTER_ADDR", Some(" "))], &["MASTER_ADDR=\" \""]);
    refused(&[&LWS], &[("LWS_LEADER_ADDRESS", None)], &["MASTER_ADDR is not set"]);
}

#[test]
fn a_name_that_only_this_machine_has_for_itself_is_doubted() {
    let (own, other) = ("127.0.1.1:29500".parse().unwrap(), "10.0.0.7:29500".parse().unwrap());
    let doubt = |changes: &[(&str, Option<&str>)], at| torchrun(changes).unwrap().doubt(Some(at));
    let text = doubt(&[], own).unwrap();
    assert!(text.contains("at node0, which is 127.0.1.1 on rank 0's machine"), "{text}");
    assert_eq!(doubt(&[], other), None);
    assert_eq!(doubt(&[("LOCAL_WORLD_SIZE", Some("8"))], own), None);
    assert!(doubt(&[("LOCAL_WORLD_SIZE", Some("4"))], own).is_some());
    for meant in ["localhost", "127.0.0.1", "::1"] {
        assert_eq!(doubt(&[("MASTER_ADDR", Some(meant))], own), None);
    }
    assert_eq!(doubt(&[("SYMMPOOL_STORE", Some("file:///scratch"))], own), None);
    assert_eq!(torchrun(&[]).unwrap().doubt(None), None);
}

#[test]
fn ranks_may_meet_in_a_folder() {
    let folder = ("SYMMPOOL_STORE", Some("file:///scratch/job 7"));
    let found = launch(&[&OPEN_MPI], &[folder, ("OMPI_COMM_WORLD_LOCAL_SIZE", Some("1"))]);
    assert_eq!(found.store_address(), "file:///scratch/job 7");
    assert_eq!(torchrun(&[folder]).unwrap().store, StoreAddress::Folder("/scratch/job 7".into()));
    for wrong in ["/scratch", "file://scratch", "file://", "tcp://a:1", "x"] {
        refused(
            &[&TORCHRUN],
            &[("SYMMPOOL_STORE", Some(wrong))],
            &["SYMMPOOL_STORE=", wrong, "file:///DIRECTORY"],
        );
    }
}

#[test]
fn half_a_launcher_is_an_error_with_the_variable_that_is_missing() {
    for (variables, rank, world) in [
        (&TORCHRUN[..], "RANK", "WORLD_SIZE"),
        (&MPICH, "PMI_RANK", "PMI_SIZE"),
        (&SLURM, "SLURM_PROCID", "SLURM_NTASKS"),
        (&LWS, "LWS_WORKER_INDEX", "LWS_GROUP_SIZE"),
    ] {
        refused(&[variables], &[(rank, None)], &[rank, "is not set, but", &format!("{world}=")]);
        refused(&[variables], &[(world, None)], &[world, "is not set, but", &format!("{rank}=")]);
    }
    refused(&[&SLURM], &[("SLURM_PROCID", None)], &["start the program by srun"]);
    let pmix = [("PMIX_RANK", Some("1"))];
    refused(&[], &pmix, &["WORLD_SIZE is not set, but PMIX_RANK=1 is (PMIx)", "number of ranks"]);
    refused(
        &[],
        &[("JOB_COMPLETION_INDEX", Some("1"))],
        &["WORLD_SIZE is not set, but JOB_COMPLETION_INDEX=1"],
    );
    // Another launcher that is complete is taken.
    assert_eq!(launch(&[&SLURM], &[("PMI_RANK", Some("5"))]).launcher(), "Slurm's srun");
    assert_eq!(launch(&[&SLURM], &[("WORLD_SIZE", Some("16"))]).launcher(), "Slurm's srun");
}

#[test]
fn launchers_that_contradict_each_other_are_an_error_with_both() {
    let stale = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
    for (variables, text, key) in [
        (&SLURM[..], "SLURM_PROCID=5, SLURM_NTASKS=16 (Slurm's srun)", "slurm"),
        (&OPEN_MPI, "OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=3", "openmpi"),
        (&LWS, "LWS_WORKER_INDEX=1, LWS_GROUP_SIZE=4", "lws"),
    ] {
        let choose = format!("SYMMPOOL_LAUNCHER=env or SYMMPOOL_LAUNCHER={key}");
        refused(&[&stale, variables], &[], &["RANK=0, WORLD_SIZE=1", text, &choose]);
        let found = launch(&[&stale, variables], &[("SYMMPOOL_LAUNCHER", Some(key))]);
        assert!(found.world() > 1 && !found.launcher().contains("RANK"), "{found:?}");
        assert_eq!(launch(&[&stale, variables], &[("SYMMPOOL_LAUNCHER", Some("env"))]).world(), 1);
    }
    // One variable is enough for a contradiction.
    refused(&[&SLURM], &[("RANK", Some("4"))], &["RANK=4 (", "SLURM_PROCID=5"]);
    refused(
        &[&OPEN_MPI],
        &[("WORLD_SIZE", Some("8"))],
        &["WORLD_SIZE=8 (", "OMPI_COMM_WORLD_SIZE=3"],
    );
}

#[test]
fn a_batch_script_is_no_task_of_slurm() {
    let step: Vec<_> =
        ["ID", "NODELIST", "NUM_NODES"].map(|part| format!("SLURM_STEP_{part}")).into();
    let batch: Vec<_> = step.iter().map(|name| (name.as_str(), None)).collect();
    let with_address = [&batch[..], &[("MASTER_ADDR", Some("node07"))]].concat();
    for script in [&batch, &with_address] {
        refused(
            &[&SLURM],
            script,
            &["SLURM_PROCID=5, SLURM_NTASKS=16 count tasks of a batch script", "by srun"],
        );
    }
    let alone =
        [("SLURM_NTASKS", Some("1")), ("SLURM_PROCID", Some("0")), ("MASTER_ADDR", Some("a"))];
    assert_eq!(launch(&[&SLURM], &[&batch[..], &alone].concat()).world(), 1);
    // Processes of another launcher in the script are that one's.
    assert_eq!(launch(&[&OPEN_MPI, &SLURM], &batch).rank(), 2);
}

#[test]
fn launchers_run_inside_others() {
    // Agents of torchrun are processes of Slurm, of which there may be as many as ranks.
    let agents = [("TORCHELASTIC_RUN_ID", Some("7")), ("SLURM_NTASKS", Some("8"))];
    let found = launch(&[&TORCHRUN, &SLURM], &agents);
    assert_eq!((found.rank(), found.launcher(), found.local_rank()), (3, "torchrun", Some(1)));
    // Slurm's number of an agent is none of a rank.
    assert_eq!(
        launch(&[&TORCHRUN, &SLURM], &[agents[0], agents[1], ("LOCAL_RANK", None)]).local_rank(),
        None
    );
    // A script that starts some ranks for each task of Slurm.
    let nested = [("SLURM_NTASKS", Some("2")), ("SLURM_PROCID", Some("1"))];
    assert_eq!(launch(&[&TORCHRUN, &SLURM], &nested).rank(), 3);
    // mpirun in a batch script, whose variables its processes have.
    let batch = [("SLURM_NTASKS", Some("3")), ("SLURM_PROCID", Some("0"))];
    assert_eq!(launch(&[&OPEN_MPI, &SLURM], &batch).launcher(), "Open MPI's mpirun");
    let hydra = [batch[0], batch[1], ("MASTER_PORT", Some("1"))];
    assert_eq!(launch(&[&MPICH, &SLURM], &hydra).rank(), 1);
    // srun --mpi=pmi2 sets the variables of MPICH too, and only Slurm's say where rank 0 is.
    let pmi2 = [
        ("PMI_RANK", Some("5")),
        ("PMI_SIZE", Some("16")),
        ("MPI_LOCALRANKID", None),
        ("MPI_LOCALNRANKS", None),
    ];
    let found = launch(&[&MPICH, &SLURM], &pmi2);
    assert!(
        found.store_address().starts_with("node07:") && found.local_rank() == Some(1),
        "{found:?}"
    );
    // Pods of an indexed job in which torchrun or a script starts ranks.
    let pod = [("JOB_COMPLETION_INDEX", Some("1")), ("PMIX_RANK", Some("7"))];
    assert_eq!(torchrun(&pod).unwrap().rank(), 3);
}

#[test]
fn a_launcher_that_is_chosen_must_be_there() {
    let choose = |key| [("SYMMPOOL_LAUNCHER", Some(key))];
    refused(&[&TORCHRUN], &choose("slurm"), &["SLURM_PROCID is not set", "srun"]);
    refused(
        &[&TORCHRUN],
        &choose("mpi"),
        &["SYMMPOOL_LAUNCHER=\"mpi\"", "env, openmpi, mpich, slurm, lws, pmix, kubernetes"],
    );
    assert_eq!(torchrun(&choose("")).unwrap().rank(), 3);
}

#[test]
fn the_port_avoids_torchruns_own_store() {
    let agent = ("TORCHELASTIC_USE_AGENT_STORE", Some("True"));
    let at =
        |changes: &[(&str, Option<&str>)]| torchrun(changes).map(|found| found.store_address());
    assert_eq!(at(&[agent]).unwrap(), "node0:29501");
    assert_eq!(at(&[("TORCHELASTIC_USE_AGENT_STORE", Some("False"))]).unwrap(), "node0:29500");
    assert_eq!(at(&[agent, ("SYMMPOOL_PORT", Some("7000"))]).unwrap(), "node0:7000");
    assert_eq!(
        at(&[("SYMMPOOL_PORT", Some("7000")), ("MASTER_PORT", None)]).unwrap(),
        "node0:7000"
    );
    let last = at(&[agent, ("MASTER_PORT", Some("65535"))]).unwrap_err();
    assert!(last.to_string().contains("MASTER_PORT=65535"), "{last}");
}

#[test]
fn every_wrong_variable_is_named_with_its_value() {
    for (name, value) in [
        ("RANK", "minus one"),
        ("RANK", "8"),
        ("RANK", ""),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "99999999"),
        ("LOCAL_RANK", "-1"),
        ("MASTER_ADDR", " "),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "70000"),
        ("SYMMPOOL_PORT", "0"),
        ("SYMMPOOL_PORT", "http"),
    ] {
        refused(&[&TORCHRUN], &[(name, Some(value))], &[name, value]);
    }
    for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        refused(&[&TORCHRUN], &[(name, None)], &[name, "not set"]);
    }
    for (name, value) in
        [("SLURM_PROCID", "16"), ("SLURM_NTASKS", "x"), ("SLURM_STEP_NUM_NODES", "many")]
    {
        refused(&[&SLURM], &[(name, Some(value))], &[name, value]);
    }
    let long = "9".repeat(10 << 10);
    let error = with(&[&SLURM], &[("SLURM_PROCID", Some(&long))]).unwrap_err();
    assert!(error.to_string().len() < 500, "{error}");
}

#[test]
fn secrets_are_not_shown() {
    let found = torchrun(&[("SYMMPOOL_SECRET", Some("hunter2"))]).unwrap();
    assert_eq!(found.secret.as_deref(), Some("hunter2"));
    assert!(!format!("{found:?}").contains("hunter2"));
    assert_eq!(torchrun(&[("SYMMPOOL_SECRET", Some(""))]).unwrap().secret, None);
}
