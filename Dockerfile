# docker build -t speedrun . && docker run --gpus all --ipc=host -v "$PWD/data:/app/data" -v "$PWD/logs:/app/logs" speedrun
FROM python:3.12-slim-bookworm

# Triton builds its launchers with a C compiler at run time. Logs say `commit: unknown`: .git stays outside.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
ENTRYPOINT ["./run.sh"]
