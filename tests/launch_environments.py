"""What real launchers put into the environment of their ranks, recorded and trimmed to what might matter.

torchrun 2.13, accelerate 1.15, OpenMPI 4.1.4, MPICH 4.0.2, Slurm 22.05; rank 1 of 2 on a host called "vm".
"""

TORCHRUN = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "33221",
    "RANK": "1",
    "ROLE_NAME": "default",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_dm3_07gp/attempt_0/1/error.json",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "80132c6f-9afb-4bf5-81fa-103dc2429f0c",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "2",
}
# `accelerate launch --multi_gpu --num_processes 2`
ACCELERATE = TORCHRUN | {
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_MIXED_PRECISION": "no",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
# `accelerate launch --cpu --num_processes 2`: one process, whatever was asked, and no rank variables.
ACCELERATE_ONE = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "True",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
OPENMPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1147863041",
    "OMPI_MCA_orte_bound_at_launch": "1",
    "OMPI_MCA_orte_hnp_uri": "1147863040.0;tcp://192.0.2.2:48291;tcp6://[fd00::2]:59723",
    "OMPI_MCA_orte_num_nodes": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "1147863041",
    "PMIX_RANK": "1",
}
MPICH = {
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "vm",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
# The script given to `sbatch -n 2`: it has a process id and a count of tasks, but is none of the tasks.
SBATCH = {
    "SLURMD_NODENAME": "vm",
    "SLURM_GTIDS": "0",
    "SLURM_JOBID": "2",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "vm",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "vm",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2",
}
# The shell of `salloc -n 2`
SALLOC = {
    "SLURM_JOBID": "4",
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "vm",
    "SLURM_NNODES": "1",
    "SLURM_NODELIST": "vm",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_TASKS_PER_NODE": "2",
}
# `srun -n 2` inside that script
SRUN = SBATCH | {
    "SLURM_GTIDS": "0,1",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_LOCALID": "1",
    "SLURM_PROCID": "1",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "vm",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
# `srun --ntasks=1` there: a task that may start ranks itself, as `srun --pty bash` gives a person a shell
SRUN_ONE = SRUN | {
    "SLURM_GTIDS": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NPROCS": "1",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEPID": "1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
}
