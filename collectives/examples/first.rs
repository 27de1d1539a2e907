//! A first all-reduce: every rank contributes its number plus one.

use symmpool_allocator::{Deadline, Driver, Group, Pool, Result, Stream};
use symmpool_collectives::{Communicator, ReduceOp};

fn main() -> Result<()> {
    clap::Command::new("first").about("Sums up every rank's number plus one").get_matches();
    let group = Group::from_env(Deadline::seconds(60))?; // RANK, WORLD_SIZE, MASTER_ADDR, ...; 60 s to connect
    let rank = group.rank();
    let pool = Pool::builder(group).driver(Driver::host()?).build()?;

    let x = pool.alloc::<f32>(1 << 20)?; // a Block: symmetric, placed by counter
    x.write(&vec![rank as f32 + 1.0; 1 << 20])?;
    pool.commit()?; // collective; names who diverged, if anyone

    let comm = Communicator::new(&pool)?;
    comm.all_reduce(&x, ReduceOp::Sum, &Stream::DEFAULT)?; // in place
    println!("rank {rank}: {}", x.read()?[0]);
    Ok(())
}
